"""The parts of `bench.device`, the most valuable first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import published
from bench.device.running import TRACE, Part
from icejax.runtime import compiler_options
from icejax.runtime.host_reads.choose import CHOICE

MACHINE, TEXT, NEEDLE, DECODE, PREFILL, TURNS = (
    f"{name}.jsonl" for name in ("machine", "text", "needle", "decode", "prefill", "turns")
)
PUBLISHED = "qwen2.5-coder-0.5b"  # the model that is asked in turns
TURNED = ("full", "clustered", "coded", "restkv", "snapkv", "streaming", "h2o", "lacache")  # its caches
GRAPHS = "--xla_gpu_enable_command_buffer="
# Flags for a GPU's compiler besides `icejax.runtime.compiler_options.OPTIONS`.
XLA_FLAGS = {
    "no graphs": GRAPHS,
    "conditions in graphs": f"{GRAPHS}FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE",
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of all parts.

    Attributes:
        model, cache: shapes of `bench.steps.shapes`: a whole model, and a model with little besides attention.
        short, long, longest: contexts in tokens.
        needle: context of the needles, in tokens.
        questions: needle questions per task.
        text: tokens of the prompt and of the answer.
        some, many: rows of a batch.
        steps: timed decode steps.
        layers: layers of a prefill, which are all alike; None: all of the model.
        mebibytes: size of the array that measures rates.
        share: factor of the least seconds that a part needs.
        backends: ways of reading host memory to time.
        bits: options of `bench.device.bits`.
        turns: contexts of questions in turns, in tokens.
    """

    model: str = "llama-3.1-8b"
    cache: str = "attention"
    short: int = 32768
    long: int = 131072
    longest: int = 524288
    needle: int = 8192
    questions: int = 8
    text: tuple[int, int] = (4096, 128)
    some: int = 4
    many: int = 8
    steps: int = 128
    dtype: str = "bfloat16"
    layers: int | None = 8
    mebibytes: int = 2048
    share: float = 1.0
    backends: tuple[str, ...] = ("triton", "gather", "host_compute")
    bits: tuple[str, ...] = ()
    turns: tuple[int, ...] = (50_000, 200_000)


TINY = Sizes(
    model="bundled", cache="bundled", short=1024, long=2048, longest=3072, needle=512, questions=1, text=(256, 4),
    some=2, many=3, steps=16, dtype="float32", layers=None, mebibytes=16, share=0.02,
    backends=("host_compute", "slices"), bits=("--tiny",), turns=(),
)  # fmt: skip


def parts(sizes: Sizes, scratch: Path) -> list[Part]:
    """Returns all parts in their order."""
    text = (*map(str, sizes.text), str(scratch / "text"))
    return [
        _part(sizes, "versions and link", MACHINE, ("bench.device.machine", str(sizes.mebibytes)), least=15, most=60),
        _part(sizes, "doctor", MACHINE, ("icejax.doctor", "--json"), least=25, most=120),
        _part(sizes, "bits of every backend", MACHINE, ("bench.device.bits", *sizes.bits), least=20, most=90),
        _part(sizes, "text against the CPU", TEXT, ("bench.device.text", *text), least=40, most=150),
        _needle(sizes, "clustered"),
        *_first(sizes, scratch),
        _needle(sizes, "full"),
        *_options(sizes),
        *_batches(sizes),
        *_prefill(sizes),
        *_longest(sizes),
        *_turns(sizes),
    ]


def _part(sizes: Sizes, name: str, file: str, command: Sequence[str], *, least: float, most: float, **fields) -> Part:
    return Part(name, file, ("-m", *command), least=sizes.share * least, most=most, **fields)


def _needle(sizes: Sizes, cache: str) -> Part:
    options = ("--tasks", "single,hops", "--lengths", str(sizes.needle), "--questions", str(sizes.questions), "--cache", cache)
    command = ("bench.needle.evaluate", *options, *(("--budget", "64") if cache == "clustered" else ()))
    return _part(sizes, f"needles, {cache}", NEEDLE, command, least=30, most=120)


def _decode(
    sizes: Sizes, name: str, shape: str, contexts: Sequence[int], policies: str, *, batch: int = 1, least: float = 90,
    most: float = 180, options: Sequence[str] = (), flags: Sequence[str] = (), profile: Path | None = None, **fields,
) -> Part:  # fmt: skip
    command = ["bench.decode", "--shape", shape, "--contexts", ",".join(map(str, contexts)), "--policies", policies]
    command += ["--batch", str(batch), "--steps", str(sizes.steps), "--dtype", sizes.dtype]
    for option, values in (("--cache-option", options), ("--flag", flags)):
        command += [word for value in values for word in (option, value)]
    command += ["--profile", str(profile)] if profile is not None else []
    counted = profile is None  # a profile runs without graphs, so there are none to count
    return _part(sizes, name, DECODE, command, least=least, most=most, counted=counted, **fields)


def _first(sizes: Sizes, scratch: Path) -> Iterator[Part]:
    """Yields the first parts: a whole model at a long context, and where its time goes."""
    model, cache, long, short = sizes.model, sizes.cache, sizes.long, sizes.short
    yield _decode(sizes, f"model, {long}, clustered", model, [long], "clustered")
    yield _decode(sizes, f"model, {long}, full", model, [long], "full", least=20)
    yield _decode(sizes, f"model, {long}, coded", model, [long], "coded")
    flag = XLA_FLAGS["no graphs"]  # kernels in a graph do not report their scope
    profile_options = dict(profile=scratch / TRACE, what=dict(xla_flags=flag), xla_flags=(flag,))
    yield _decode(sizes, f"model, {long}, profile", model, [long], "clustered", most=150, **profile_options)
    yield _decode(sizes, "cache alone", cache, [long, short], "full,clustered", least=60, most=120)


def _options(sizes: Sizes) -> Iterator[Part]:
    """Yields parts with every compiler option and every way of fetching, one at a time, mostly for the cache alone."""
    for name in compiler_options.OPTIONS["gpu"]:
        yield _alone(sizes, f"without {name.removeprefix('xla_gpu_')}", flags=[f"{name}="])
        yield _decode(
            sizes, f"model, without {name.removeprefix('xla_gpu_')}", sizes.model, [sizes.long], "clustered", flags=[f"{name}="]
        )
    for name, flag in XLA_FLAGS.items():
        yield _alone(sizes, name, what=dict(xla_flags=flag), xla_flags=(flag,))
    for name in sizes.backends:
        yield _alone(sizes, f"fetch by {name}", what=dict(backend=name), environment={CHOICE: name})
    yield _alone(sizes, "resident", options=["resident=true"])


def _alone(sizes: Sizes, name: str, **fields) -> Part:
    return _decode(sizes, f"cache alone, {name}", sizes.cache, [sizes.long], "clustered", least=35, most=90, **fields)


def _batches(sizes: Sizes) -> Iterator[Part]:
    """Yields batches, and pages that stay on the device; a large batch has int8 pages, so the host can hold them."""
    model, long, short, resident = sizes.model, sizes.long, sizes.short, "resident=true"
    yield _decode(sizes, f"model, {long}, resident", model, [long], "clustered", options=[resident])
    for batch, options in ((sizes.some, []), (sizes.many, ["page_dtype=int8"])):
        for suffix, part_options in (("", options), (", resident", [*options, resident])):
            name = f"model, {long}, batch {batch}{suffix}"
            yield _decode(sizes, name, model, [long], "clustered", batch=batch, options=part_options, least=150, most=300)
    yield _decode(sizes, f"model, {long}, batch {sizes.some}, full", model, [long], "full", batch=sizes.some, least=30)
    yield _decode(
        sizes, f"model, {long}, batch {sizes.some}, coded", model, [long], "coded", batch=sizes.some, least=150, most=300
    )
    for batch in (1, sizes.some, sizes.many):
        yield _decode(sizes, f"model, {short}, batch {batch}", model, [short], "full,clustered", batch=batch)
    for batch in (sizes.some, sizes.many):
        name = f"cache alone, batch {batch}"
        yield _decode(sizes, name, sizes.cache, [long, short], "full,clustered", batch=batch, least=85)


def _prefill(sizes: Sizes) -> Iterator[Part]:
    """Yields the prefill of two lengths by both attentions; all layers are alike, so a few of them are enough."""
    layers = () if sizes.layers is None else ("--layers", str(sizes.layers))
    shape = ("--shape", sizes.model, *layers, "--dtype", sizes.dtype)
    for length, most in ((sizes.short, 150), (sizes.long, 240)):
        for name, option in (("", ()), (", in blocks", ("--blocks",))):
            command = ("bench.prefill", *shape, "--lengths", str(length), "--repeats", "1", *option)
            yield _part(sizes, f"prefill, {length}{name}", PREFILL, command, least=60, most=most)


def _longest(sizes: Sizes) -> Iterator[Part]:
    yield _decode(sizes, f"cache alone, {sizes.longest}", sizes.cache, [sizes.longest], "clustered,full", least=65)
    for policy in ("clustered", "full"):
        name = f"model, {sizes.longest}, {policy}"
        yield _decode(sizes, name, sizes.model, [sizes.longest], policy, least=150, most=300)


def _turns(sizes: Sizes) -> Iterator[Part]:
    """Yields questions in turns on a published model, which must be in the cache directory as a folder or a GGUF file."""
    folder, file = published.home() / PUBLISHED, published.home() / published.MODELS[PUBLISHED].file
    source = file if file.exists() and not folder.exists() else folder
    for length in sizes.turns:
        for cache in TURNED:
            command = ("bench.device.turns", str(source), str(length), cache)
            yield _part(sizes, f"turns, {length}, {cache}", TURNS, command, least=45, most=150, needs=source)
