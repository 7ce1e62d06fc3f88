"""The options of `icejax generate` and `icejax chat`, in groups, and what they are turned into."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from icejax.cache.options import cache_options, make_policy, option_texts
from icejax.cache.protocol import CachePolicy
from icejax.cache.registry import POLICIES, PRESETS, name_of, names
from icejax.checks.errors import InputError, printable, quoted, suggestion
from icejax.checks.numbers import integer, number
from icejax.commands.terminal.process import write
from icejax.engine.request import AnswerOptions
from icejax.engine.sampling import Sampling
from icejax.runtime import compile_cache
from icejax.text.chat_messages import template_variables

AUTO, DEFAULT_CACHE, TOLERANT = "auto", "clustered", "tolerant"
LOG = logging.getLogger(__name__)
SHORT_FLAGS = {"temperature": ["--temp"]}  # llama.cpp's name
OF_CACHE = ("budget", "page_size", "tolerance", "max_budget")  # flags that are options of the cache


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, with the known option closest to an unknown one."""

    def parse_args(self, args: list[str] | None = None, namespace: argparse.Namespace | None = None) -> argparse.Namespace:
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            hint = suggestion(flag, self._option_string_actions) if flag.startswith("-") else " (are quotes missing?)"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return options

    def error(self, message: str) -> NoReturn:
        self.exit(2, printable(f"{self.prog}: error: {message}") + "\n")


class HelpCache(argparse.Action):
    """Prints the options of every cache, one line each."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        blocks = [
            f"{name}:\n" + ("".join(f"  {option}: {text}\n" for option, text in option_texts(name).items()) or "  no options\n")
            for name in POLICIES
        ]
        for name, (kind, preset_options) in PRESETS.items():
            options = ", ".join(f"{key}={str(value).lower()}" for key, value in preset_options.items())
            blocks.append(f"{name}: {name_of(kind())} with {options}\n")
        write("\n".join(blocks))
        parser.exit()


def parser(name: str) -> Parser:
    """Returns the parser of `generate`; its defaults are those of the dataclasses."""
    parser = Parser(prog=name, description="Generate text from a long prompt. Without arguments: the bundled example.")
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("text", nargs="*", metavar="PROMPT", help="the prompt, as --prompt takes it")
    prompts.add_argument("-p", "--prompt", action="append", default=[], metavar="TEXT", help="repeatable; - reads stdin")
    prompts.add_argument("-f", "--prompt-file", type=Path, metavar="FILE", help="text, or .jsonl with an object per line")
    prompts.add_argument("--chat", action="store_true", help="put each prompt into the tokenizer's chat template")
    prompts.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    prompts.add_argument("--session", type=Path, metavar="DIR", help="put the prompts to the session kept there, or a new one")
    prompts.add_argument("--batch-size", type=int, default=8, metavar="N", help="prompts run together (default: %(default)s)")
    output_help = "with a .jsonl file: add an answer per line to FILE; lines that it has are not answered again"
    prompts.add_argument("-o", "--output", type=Path, metavar="FILE", help=output_help)
    shard_help = "with --output: answer only every N-th line, from the I-th (from 0), for job arrays"
    prompts.add_argument("--shard", metavar="I/N", help=shard_help)
    add_ray(prompts)
    add_model(parser)
    _add_answer(parser)
    add_cache(parser)
    add_processes(parser, "0 prints the answers")
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--json", action="store_true", help="print one JSON object per prompt")
    shown.add_argument("--no-stream", action="store_true", help="print an answer when it is whole")
    shown.add_argument("--logprobs", type=int, metavar="N", help="with --json: of each token and of the N most likely ones")
    add_quiet(shown)
    shown.add_argument("--verbose", action="store_true", help="how each layer caches, padding, backends, time of compiling")
    shown.add_argument("--explain", type=Path, metavar="FILE.png", help="draw what each layer looked at; also as JSON")
    return parser


def chat_parser(name: str) -> Parser:
    """Returns the parser of `chat`."""
    parser = Parser(prog=name, description="Talk with a model whose tokenizer has a chat template.")
    parser.add_argument("--system", metavar="TEXT", help="the message that the conversation begins with")
    parser.add_argument("--session", type=Path, metavar="DIR", help="continue with the conversation kept there, or begin it")
    add_quiet(parser)
    add_model(parser)
    _add_answer(parser)
    add_cache(parser)
    return parser


def add_quiet(group: argparse._ActionsContainer) -> None:
    """Adds the option that silences progress and costs."""
    group.add_argument("--quiet", action="store_true", help="show neither progress nor a table of the cost")


def add_processes(parser: Parser, first: str) -> None:
    """Adds the options of a group of processes; `first` says what process 0 does."""
    group = parser.add_argument_group("several processes, with --mesh")
    coordinator_help = "an address of process 0, or auto: what SLURM, a TPU pod or Kubernetes say of all three"
    group.add_argument("--coordinator", metavar="HOST:PORT", help=coordinator_help)
    group.add_argument("--processes", type=int, metavar="N", help="number of processes")
    group.add_argument("--process", type=int, metavar="I", help=f"number of this one, from 0; {first}")


def add_ray(group: argparse._ActionsContainer) -> None:
    """Adds the options of a cluster."""
    address_help = "spread the work over a Ray cluster: HOST:PORT, auto (the one of this machine), or local (a new one)"
    group.add_argument("--ray", metavar="ADDRESS", help=address_help)
    workers_help = "models on the cluster (default: one per GPU or TPU chip; without any, one per machine)"
    group.add_argument("--ray-workers", type=int, metavar="N", help=workers_help)


def check_ray(arguments: argparse.Namespace) -> None:
    """Raises InputError if the options of a cluster are out of range, or the package is missing."""
    if arguments.ray_workers is not None:
        integer("--ray-workers", arguments.ray_workers, most=2**20)
        if arguments.ray is None:
            raise InputError("--ray-workers needs --ray ADDRESS")
    if arguments.ray is not None and importlib.util.find_spec("ray") is None:
        raise InputError("--ray needs ray: pip install 'icejax[ray]'")


def make_absolute(arguments: argparse.Namespace) -> None:
    """Makes the paths of the model and its template absolute: processes on other machines have other working directories."""
    if arguments.chat_template is not None:
        arguments.chat_template = arguments.chat_template.absolute()
    if arguments.model is not None and Path(arguments.model).expanduser().exists():
        arguments.model = str(Path(arguments.model).expanduser().absolute())


def add_weights(parser: Parser) -> argparse._ArgumentGroup:
    """Adds the options of a model's weights."""
    group = parser.add_argument_group("model")
    group.add_argument("-m", "--model", help="Hugging Face or icejax folder, GGUF file or hub id (default: the bundled model)")
    group.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub id (default: main)")
    group.add_argument("--dtype", help="float32, bfloat16 or float16 (default: the checkpoint's; float32 on CPU)")
    group.add_argument("--quantize", metavar="METHOD", help="round matrices to int8, fp8 or int4 as they are read")
    hosted = "keep experts in host memory, and N of each layer on the device too (default: half of them)"
    group.add_argument("--experts-on-host", type=int, nargs="?", const=True, metavar="N", help=hosted)
    meshed = "heads=N: N devices share the KV heads, each with its part of the weights and pages (default: one device)"
    group.add_argument("--mesh", metavar="heads=N[,tokens=M]", help=f"{meshed}; tokens=M: M devices to each KV head")
    text = f"where compiled programs are kept, the last used {compile_cache.MOST_BYTES // 2**30} GiB of them; 'none' keeps none"
    group.add_argument("--compile-cache", metavar="DIR", help=text)
    return group


def add_model(parser: Parser) -> None:
    """Adds the options of a model and its chat template."""
    group = add_weights(parser)
    group.add_argument("--chat-template", type=Path, metavar="FILE", help="chat template (Jinja) in the tokenizer's place")
    template_arg_help = "variable of the chat template; repeatable, such as enable_thinking=false"
    group.add_argument("--template-arg", action="append", default=[], metavar="KEY=VALUE", help=template_arg_help)
    parse_special_help = "names of control tokens in messages and prompts are these tokens, not text"
    group.add_argument("--parse-special", action="store_true", help=parse_special_help)


def _add_answer(parser: Parser) -> None:
    group = parser.add_argument_group("answer")
    group.add_argument(
        "-n",
        "--max-new-tokens",
        "--n-predict",
        type=int,
        default=AnswerOptions.max_new_tokens,
        metavar="N",
        help="default: %(default)s",
    )
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this string; repeatable")
    greedy = Sampling()
    for name in (field.name for field in dataclasses.fields(Sampling) if field.name != "logit_bias"):
        default = getattr(greedy, name)
        flags = ["--" + name.replace("_", "-"), *SHORT_FLAGS.get(name, [])]
        group.add_argument(*flags, type=type(default), metavar="X", help=f"default: {default}")
    bias_help = "add BIAS, from -100 to 100, to the logit of the token with this id; repeatable"
    group.add_argument("--logit-bias", action="append", default=[], metavar="ID=BIAS", help=bias_help)
    model_help = "take the sampling of the model's generation_config.json; the options above override it"
    group.add_argument("--sampling", choices=["model"], help=model_help)
    group.add_argument("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")


def add_cache(parser: Parser, *, has_context: bool = True) -> None:
    """Adds the options of a cache."""
    group = parser.add_argument_group("cache")
    cache_help = (
        f"{AUTO}: full where it fits the device and is no slower, else {DEFAULT_CACHE}, which options of a cache mean too"
    )
    cache_help += f"; or one of {', '.join(names())} (default: {AUTO}, or the session's)"
    group.add_argument("--cache", metavar="NAME", help=cache_help)
    group.add_argument("--budget", type=int, metavar="N", help="tokens attended exactly per KV head and layer (default: 256)")
    tolerance_help = f"relative error above which a KV head attends to more: the cache {TOLERANT}, beside --budget"
    group.add_argument("--tolerance", type=float, metavar="E", help=tolerance_help)
    group.add_argument("--max-budget", type=int, metavar="N", help="tokens it then attends to exactly, with --tolerance")
    group.add_argument("--page-size", type=int, metavar="N", help="tokens of a page (default: the cache's own)")
    group.add_argument("--cache-option", action="append", default=[], metavar="KEY=VALUE", help="repeatable; see --help-cache")
    group.add_argument("--help-cache", action=HelpCache, nargs=0, help="show every option of every cache and exit")
    if has_context:
        context_help = "tokens of prompt and answer (default: the model's)"
        group.add_argument("-c", "--context-length", type=int, metavar="N", help=context_help)
    device_help = f"of the device, for {AUTO} (default: what it reports)"
    group.add_argument("--device-memory", type=float, metavar="GIB", help=device_help)
    group.add_argument("--host-memory-limit", type=float, metavar="GIB", help="for the cache (default: what is free)")


def answer(arguments: argparse.Namespace) -> AnswerOptions:
    """Returns the options of the answers; InputError for an option that is out of range."""
    return AnswerOptions(
        sampling=Sampling(**sampling(arguments)),
        max_new_tokens=arguments.max_new_tokens,
        stop=tuple(arguments.stop),
        seed=arguments.seed,
        parse_special=arguments.parse_special,
        logprobs=getattr(arguments, "logprobs", None),
    )


def sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of `Sampling` that the command line sets; InputError for a logit bias that is not ID=BIAS."""
    options = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Sampling)}
    biases = dict(map(_logit_bias, arguments.logit_bias))
    return {name: value for name, value in (options | {"logit_bias": biases or None}).items() if value is not None}


def _logit_bias(text: str) -> tuple[str, float]:
    """Returns the token id and the number in a text ID=BIAS, both not checked yet."""
    token, _, bias = text.partition("=")
    try:
        return token, float(bias)
    except ValueError:
        raise InputError(f"--logit-bias must be ID=BIAS, a token id and a number, got {text!r}") from None


def template_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of the chat template by name; a value is JSON, such as false or 3, or else text.

    Raises:
        InputError: an argument has no value, or its name is none of a template's own variables.
    """
    values = {}
    for argument in arguments.template_arg:
        name, equals, text = argument.partition("=")
        if not equals:
            raise InputError(f"--template-arg takes KEY=VALUE, such as enable_thinking=false, got {quoted(argument)}")
        try:
            values[name] = json.loads(text)
        except (ValueError, RecursionError):
            values[name] = text
    return template_variables(arguments=values)


def tell_greedy(arguments: argparse.Namespace, samplings: Iterable[Sampling]) -> None:
    """Warns of sampling options that have no effect, because no answer draws its tokens at random."""
    values, greedy = sampling(arguments), Sampling()
    names = [name for name in ("top_k", "top_p", "min_p") if values.get(name, getattr(greedy, name)) != getattr(greedy, name)]
    if names and not any(sampling.samples for sampling in samplings):
        flags = ", ".join("--" + name.replace("_", "-") for name in names)
        LOG.warning("%s without --temperature: no effect, the most likely token is taken", flags)


def policy(arguments: argparse.Namespace) -> CachePolicy | None:
    """Returns the cache policy, None being a choice; InputError for an unknown cache, or an option that is out of range."""
    if arguments.max_budget is not None and arguments.tolerance is None and arguments.cache != TOLERANT:
        raise InputError("--max-budget needs --tolerance: it bounds what a tolerance may take")
    user_options = cache_options(arguments.cache_option, **{name: getattr(arguments, name) for name in OF_CACHE})
    name = None if arguments.cache == AUTO else arguments.cache
    if name is None and not user_options:
        return None
    return make_policy(name or (DEFAULT_CACHE if arguments.tolerance is None else TOLERANT), user_options)


def memory_limits(arguments: argparse.Namespace) -> dict[str, int | None]:
    """Returns the bytes of device memory and host memory that the command line names; InputError for an invalid limit."""
    return {name: _memory(arguments, name) for name in ("device_memory", "host_memory_limit")}


def _memory(arguments: argparse.Namespace, name: str) -> int | None:
    """Returns the bytes of an option in GiB; None: it is not given."""
    size, flag = getattr(arguments, name), "--" + name.replace("_", "-")
    return None if size is None else int(number(flag, size, least=0, most=1e9, above=True) * 2**30)
