"""Worker process for untrusted chat templates and regular expressions, which may loop for ever or fill the memory.

`icejax/sandbox/client.py` starts this file by its path, with the folders of Jinja as arguments. It loads nothing else, so it
starts fast. It reads requests from stdin and writes answers to stdout, one JSON object per line. A template has the same
functions and variables as in transformers.
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
    """The `generation` tag, which marks the assistant's text for training; here it has no effect."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(["name:endgeneration"], drop_needle=True)).set_lineno(line)


class MakeDict:
    """Stands for `dict` in a template: not a class, from which a template could reach other classes."""

    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)

    def fromkeys(self, *args, **kwargs):
        return dict.fromkeys(*args, **kwargs)


class PlainNamespace(Namespace):
    """Jinja's namespace, but no name may begin with an underscore, as Python's own attributes do."""

    def __init__(*args, **kwargs):  # like Jinja's: an attribute may be named `self`
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
    """Writes JSON without the escapes for HTML that Jinja's own filter makes."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


ENVIRONMENT = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
ENVIRONMENT.filters["tojson"] = tojson
ENVIRONMENT.globals |= dict(raise_exception=raise_exception, dict=MakeDict(), namespace=PlainNamespace)


@lru_cache(maxsize=16)
def compiled(template, names, marks):
    """Returns a template with the marks around the names in its texts; of equal beginnings the longest name counts."""
    tree = ENVIRONMENT.parse(template)
    pattern = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
    for node in tree.find_all((nodes.Const, nodes.TemplateData)) if names else ():
        field = "data" if isinstance(node, nodes.TemplateData) else "value"
        text = getattr(node, field)
        if isinstance(text, str):
            setattr(node, field, pattern.sub(lambda match: match[0].join(marks), text))
    return ENVIRONMENT.from_string(tree)


def fits(expression, names):
    """Returns whether a regular expression matches the start of one of the names, and the CPU seconds it took; or a fault."""
    started = time.process_time()
    try:
        match = any(re.match(expression, name) for name in names)
        return {"fits": match, "seconds": time.process_time() - started}
    except Exception as error:
        return {"fault": f"fails: {' '.join(str(error).split())[:300] or type(error).__name__}"}


def rendered(template, variables, now, most, names=(), marks=()):
    """Returns the text of a template, or a fault.

    Args:
        now: unix time.
        most: the largest number of characters.
        names, marks: texts, and the two characters before and after each of them in the template.
    """

    def strftime_now(form):
        return datetime.fromtimestamp(now).strftime(form)

    pieces, size = [], 0
    try:
        for piece in compiled(template, tuple(names), tuple(marks)).generate(variables, strftime_now=strftime_now):
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
    """Sets a resource limit of this process, but not above the present hard limit."""
    hard_limit = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value if hard_limit == resource.RLIM_INFINITY else min(value, hard_limit), hard_limit))


def main():
    """Answers requests until stdin ends."""
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, 0)
    if sys.platform == "linux":  # other systems refuse it
        limit(resource.RLIMIT_AS, MEMORY)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        # A loop ends at this limit even if the client is gone.
        limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime + request.pop("seconds")) + 1)
        answer = (fits if "expression" in request else rendered)(**request)
        text = json.dumps(answer, ensure_ascii=False)
        sys.stdout.buffer.write(text.encode("utf-8", "surrogatepass") + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
