"""``icejax convert``, ``python -m convert.hf_to_orbax`` and ``python -m convert.orbax_to_hf``: converts a checkpoint folder.

It calls `icejax.checkpoint.convert`.
"""

from __future__ import annotations

from pathlib import Path

from icejax.checkpoint.convert import hf_to_orbax, orbax_to_hf
from icejax.checkpoint.folder import ORBAX, resolve
from icejax.checks.errors import printable
from icejax.commands.options import Parser
from icejax.commands.terminal.phases import progress
from icejax.commands.terminal.process import ending
from icejax.commands.terminal.stderr import stderr_console
from icejax.runtime.out_of_memory import report_out_of_memory

HF = "Hugging Face folder, GGUF file or hub id SRC -> icejax (Orbax) folder DST"
BACK = "icejax (Orbax) folder SRC -> Hugging Face folder DST"


def main(argv: list[str] | None = None, *, name: str, to: str | None = None) -> int:
    """Runs the command line and returns the exit status; `to` is `orbax` or `hf`, None: the form that SRC does not have."""
    return ending(name, lambda: _run(argv, name, to))


def _run(argv: list[str] | None, name: str, to: str | None) -> None:
    parser = Parser(prog=name, description={"orbax": f"{HF}.", "hf": f"{BACK}.", None: f"{HF}, or {BACK}."}[to])
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("target", metavar="DST", type=Path)
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub id (default: main)")
    parser.add_argument("--quantize", metavar="METHOD", help="round matrices to int8, fp8 or int4, as compressed-tensors")
    mesh_help = "each of N devices reads, rounds and writes a part of every tensor's rows"
    parser.add_argument("--mesh", metavar="heads=N", help=mesh_help)
    parser.add_argument("--force", action="store_true", help="replace DST if it is a checkpoint folder")
    arguments = parser.parse_args(argv)
    source = resolve(arguments.source, revision=arguments.revision)
    to_hf = to == "hf" or (to is None and (source / ORBAX).is_dir())
    advice = "convert with --mesh, or on a machine with more memory: two of the largest tensors are in memory at once"
    with report_out_of_memory(advice, None), progress(stderr_console()) as bars:
        bar = bars.add_task("convert", total=None)

        def show_progress(key: str, done: int, total: int) -> None:
            bars.update(bar, completed=done, total=total, description=key)

        convert = orbax_to_hf if to_hf else hf_to_orbax
        options = dict(quantize=arguments.quantize, force=arguments.force, mesh=arguments.mesh)
        convert(source, arguments.target, progress=show_progress, **options)
    size = sum(file.stat().st_size for file in arguments.target.rglob("*") if file.is_file())
    form = "a Hugging Face" if to_hf else "an icejax (Orbax)"
    print(f"wrote {printable(str(arguments.target))}: {form} folder of {size / 2**20:.1f} MiB")
