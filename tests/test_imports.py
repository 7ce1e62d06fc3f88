"""The package's structure: imports run one way, importing icejax is cheap, public names exist, files stay small."""

import ast
import subprocess
import sys
from pathlib import Path

import icejax

PACKAGE = Path(icejax.__file__).parent
# A package may import from its own level and from earlier ones.
LEVELS = (
    ("checks",),
    ("files", "sandbox"),
    ("config", "runtime"),
    ("ops",),
    ("models", "cache"),
    ("checkpoint",),
    ("text",),
    ("engine",),
    ("api",),
    ("session", "evaluation", "serving"),
    ("commands", "ray"),
    ("generate", "doctor", "__init__", "__main__"),
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}


def imported(file: Path) -> set[str]:
    """Returns the modules that a file imports."""
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            from_root = node.module == "icejax"
            modules |= {f"icejax.{alias.name}" for alias in node.names} if from_root else {node.module}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return modules


def test_imports_run_one_way():
    faults = []
    for file in PACKAGE.rglob("*.py"):
        layer = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for module in imported(file):
            top, *rest = module.split(".")
            if top in ("convert", "bench", "tests", "torch"):
                faults.append(f"{file.name} imports {module}")
            if top == "icejax" and rest and LEVEL.get(rest[0], 0) > LEVEL[layer]:
                faults.append(f"{layer} imports {rest[0]}")
    assert not faults


def test_models_and_caches_do_not_know_each_other():
    for folder, other in (("models", "cache"), ("cache", "models")):
        for file in (PACKAGE / folder).rglob("*.py"):
            assert not {module for module in imported(file) if module.startswith(f"icejax.{other}")}, (
                f"{file} imports of {other}"
            )


def test_the_protocol_and_its_bases_know_no_policy():
    for file in (PACKAGE / "cache").rglob("*.py"):
        policies = {module for module in imported(file) if module.startswith("icejax.cache.policies")}
        assert file.name == "registry.py" or file.parent.name == "policies" or not policies, f"{file} imports {policies}"


def test_only_one_file_names_devices_and_memory_spaces():
    names = ("jax.devices(", "default_backend(", "memory_kind=", "memory.Space", "SingleDeviceSharding", "xla_bridge")
    files = [file for file in PACKAGE.rglob("*.py") if file != PACKAGE / "runtime" / "devices.py"]
    assert not [(file.name, name) for file in files for name in names if name in file.read_text()]


def test_importing_icejax_takes_no_time():
    """JAX is imported with the first public name, transformers with the first tokenizer, torch never."""
    code = "import sys, icejax, icejax.commands.terminal.process; print(*({'jax', 'numpy', 'rich', 'transformers'} & set(sys.modules)))"
    code += "; icejax.generate; print(*({'torch', 'transformers'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "\n\n"


def test_every_public_name_is_there():
    for name in icejax.__all__:
        assert name == "POLICIES" or getattr(icejax, name).__module__.startswith("icejax.")
    assert set(icejax.__all__) <= set(dir(icejax)) and not hasattr(icejax, "nothing")


def test_files_stay_small():
    long_files = {file.name: lines for file in PACKAGE.rglob("*.py") if (lines := len(file.read_text().splitlines())) > 300}
    assert not long_files
