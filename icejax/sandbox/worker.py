"""The process for what strangers wrote as a program, which may loop for ever or fill the memory.

That is chat templates and regular expressions. `icejax/sandbox/client.py` starts this file by its path, with the folders that
hold Jinja: nothing else is loaded, so it is there at once. It reads requests from stdin and writes answers to stdout, one JSON
object a line. What a template sees is what transformers shows it.
"""

import json
import re
import resource
import sys
import time
from datetime import datetime
from functools import lru_cache

sys.path.extend(sys.argv[1:])

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MEMORY = 2**30  # bytes


class Generation(Extension):
    """The tag around an answer, by which training finds it: here only what it holds counts."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(["name:endgeneration"], drop_needle=True)).set_lineno(line)


class MakeDict:
    """What `dict` is to a template: no class, from which it could climb to others."""

    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)

    def fromkeys(self, *args, **kwargs):
        return dict.fromkeys(*args, **kwargs)


class PlainNamespace(Namespace):
    """Jinja's, without attributes of Python's own."""

    def __init__(*args, **kwargs):  # as Jinja's: an attribute may be named `self`
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name, value):
        _refuse_underscore(name)
        Namespace.__setitem__(self, name, value)


def _refuse_underscore(name):
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore, such as {name!r}")


def raise_exception(message):
    raise TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Jinja's own would escape what is special in HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


ENVIRONMENT = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
ENVIRONMENT.filters["tojson"] = tojson
ENVIRONMENT.globals |= dict(raise_exception=raise_exception, dict=MakeDict(), namespace=PlainNamespace)
compiled = lru_cache(maxsize=8)(ENVIRONMENT.from_string)


def fits(expression, names):
    """Returns whether a regular expression fits the beginning of one of the names, and the seconds it took; or a fault."""
    started = time.process_time()
    try:
        found = any(re.match(expression, name) for name in names)
        return {"fits": found, "seconds": time.process_time() - started}
    except Exception as error:
        return {"fault": f"fails: {' '.join(str(error).split())[:300] or type(error).__name__}"}


def rendered(template, variables, now, most):
    """Returns the text of a template, or why there is none; `now` is unix time, `most` is in characters."""

    def strftime_now(form):
        return datetime.fromtimestamp(now).strftime(form)

    pieces, size = [], 0
    try:
        for piece in compiled(template).generate(variables, strftime_now=strftime_now):
            pieces.append(piece)
            size += len(piece)
            if size > most:
                return {"fault": f"wrote more than {most} characters"}
        return {"text": "".join(pieces)}
    except MemoryError:
        return {"fault": f"took more than {MEMORY >> 30} GiB of memory"}
    except Exception as error:
        kind = "refuses the messages" if type(error) is TemplateError else "fails"
        return {"fault": f"{kind}: {' '.join(str(error).split())[:300] or type(error).__name__}"}


def limit(what, value):
    """Sets a limit of this process, but not above the one it was given."""
    most = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def main():
    """Answers requests until stdin ends."""
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, 0)
    if sys.platform == "linux":  # others do not take it
        limit(resource.RLIMIT_AS, MEMORY)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        # What loops ends by itself too, should nobody be left to end it.
        limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + request.pop("seconds")) + 1)
        answer = (fits if "expression" in request else rendered)(**request)
        answered = json.dumps(answer, ensure_ascii=False)
        sys.stdout.buffer.write(answered.encode("utf-8", "surrogatepass") + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
