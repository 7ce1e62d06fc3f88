"""Loading a tokenizer runs no code from its folder; code and pickles are planted wherever published folders can have them."""

import io
import json
import os
import pickle
import shutil
import subprocess
import sys

import pytest

import icejax
from icejax.api.generate import ASSETS
from icejax.models.registry import FAMILIES
from icejax.text import tokenizer_errors
from icejax.text.tokenizer import load_tokenizer

CODE = """
import pathlib
pathlib.Path({marker!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, ProcessorMixin
class Config(LlamaConfig): pass
class Model(LlamaForCausalLM): config_class = Config
class Tokenizer(PreTrainedTokenizerFast): pass
class Processor(ProcessorMixin): pass
def generate(*_, **__): pass
"""
AUTO_MAP = {
    "AutoConfig": "planted.Config",
    "AutoModel": "planted.Model",
    "AutoModelForCausalLM": "planted.Model",
    "AutoTokenizer": ["planted.Tokenizer", "planted.Tokenizer"],
    "AutoProcessor": "planted.Processor",
}
MAPPED = {"auto_map": AUTO_MAP}
UNKNOWN, OTHER = (
    "the tokenizer needs the folder's own code (auto_map in tokenizer_config.json)",
    "is no tokenizer: expected one",
)
# Changes to the folder's JSON files, and the error if they leave no tokenizer.
WAYS = {
    "config of an unknown kind": ({"config.json": MAPPED | {"model_type": "planted"}}, None),
    "config": ({"config.json": MAPPED}, None),
    "tokenizer": ({"tokenizer_config.json": MAPPED}, None),
    "tokenizer, old form": ({"tokenizer_config.json": {"auto_map": ["planted.Tokenizer", None]}}, None),
    "tokenizer of an unknown class": ({"tokenizer_config.json": MAPPED | {"tokenizer_class": "Tokenizer"}}, UNKNOWN),
    "tokenizer of no class": ({"tokenizer_config.json": MAPPED | {"tokenizer_class": None}}, UNKNOWN),
    "model as tokenizer": ({"tokenizer_config.json": {"tokenizer_class": "AutoModel"}, "config.json": MAPPED}, OTHER),
    "fast model": ({"tokenizer_config.json": {"tokenizer_class": "AutoModelForCausalLMFast"}, "config.json": MAPPED}, OTHER),
    "processor": ({"tokenizer_config.json": {"tokenizer_class": "AutoProcessor"}, "processor_config.json": MAPPED}, OTHER),
    "class in config": (
        {"config.json": MAPPED | {"tokenizer_class": "AutoModel"}, "tokenizer_config.json": {"tokenizer_class": None}},
        OTHER,
    ),
    "class that is no name": ({"tokenizer_config.json": {"tokenizer_class": ["AutoModel"]}}, "tokenizer_class must be a name"),
    "code said to be trusted": ({"tokenizer_config.json": MAPPED | {"trust_remote_code": True}}, None),
    "generation": ({"generation_config.json": MAPPED | {"custom_generate": "planted.generate"}}, None),
    "processors": ({name: MAPPED for name in ("processor_config.json", "preprocessor_config.json")}, None),
}


class Bomb:
    """Creates the marker file when unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def planted(folder, marker, files):
    """Returns a copy of the bundled checkpoint with planted code and pickles that create `marker` when run."""
    shutil.copytree(ASSETS, folder)
    for name in (
        "planted.py",
        "custom_generate/generate.py",
        "tokenization_planted.py",
        "__init__.py",
        "setup.py",
        "conftest.py",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(CODE.format(marker=str(marker)))
    for name in ("pytorch_model.bin", "model.pt", "tokenizer.pickle", "tokenizer.pkl", "training_args.bin", "vocab.pkl"):
        (folder / name).write_bytes(pickle.dumps(Bomb(marker)))
    for name, changes in files.items():
        fields = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(fields | changes))
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_no_code_of_a_folder_runs(tmp_path, monkeypatch, capsys, way):
    files, error = WAYS[way]
    folder, marker = planted(tmp_path / "model", tmp_path / "it ran", files), tmp_path / "it ran"
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    monkeypatch.chdir(folder)  # Python looks for modules here
    if error is None:
        assert load_tokenizer(folder)("ab").input_ids == list(b"ab")
    else:
        with pytest.raises(icejax.InputError) as raised:
            load_tokenizer(folder)
        assert "\n" not in str(raised.value)
        raised.match(error.replace("(", r"\(").replace(")", r"\)"))
    assert not marker.exists() and capsys.readouterr().out == "" and sys.stdin.tell() == 0


@pytest.mark.slow
def test_the_command_line_runs_none_of_it_whatever_stdin_says(tmp_path):
    all_changes = {name: changes for files, error in WAYS.values() if error is None for name, changes in files.items()}
    marker = tmp_path / "it ran"
    folder = planted(tmp_path / "model", marker, all_changes)
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    command = [sys.executable, "-m", "icejax.generate", "--model", folder, "--chat", "--prompt", "x", "--quiet"]
    result = subprocess.run(command, input="y\n" * 100, capture_output=True, text=True, timeout=100)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "chat template fails: access to attribute '__class__' of 'str' object is unsafe" in result.stderr
    assert not marker.exists()


def test_the_planted_pickles_and_code_would_run(tmp_path):
    """The planted code works, so the other tests can fail."""
    marker = tmp_path / "it ran"
    folder = planted(tmp_path / "model", marker, {})
    with open(folder / "tokenizer.pickle", "rb") as file:
        pickle.load(file).close()
    assert marker.exists()
    marker.unlink()
    exec((folder / "planted.py").read_text(), {})
    assert marker.exists()


def test_config_refused_by_transformers_still_gives_tokenizer(tmp_path):
    rope = {"rope_parameters": {"rope_type": "no such", "factor": "x"}, "hidden_size": -1}
    folder = planted(tmp_path / "model", tmp_path / "it ran", {"config.json": rope})
    assert load_tokenizer(folder)("ab").input_ids == list(b"ab")


def test_a_tokenizer_is_read_whatever_family_its_model_is_of(tmp_path):
    folder = planted(tmp_path / "model", tmp_path / "it ran", {})
    config = json.loads((folder / "config.json").read_text())
    for kind in FAMILIES:
        (folder / "config.json").write_text(json.dumps(config | {"model_type": kind}))
        assert load_tokenizer(folder)("ab").input_ids == list(b"ab"), kind


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"tokenizer_class": "LlamaTokenizer"}, "tokenizer.model or tokenizer.json"),
        ({"tokenizer_class": "Qwen2Tokenizer"}, "vocab.json or merges.txt or tokenizer.json"),
    ],
)
def test_a_folder_without_its_vocabulary_has_no_tokenizer(tmp_path, settings, expected):
    folder = planted(tmp_path / "model", tmp_path / "it ran", {})
    for file in folder.glob("tokenizer*"):
        file.unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(icejax.InputError, match=f"model has no vocabulary file: expected {expected}$"):
        load_tokenizer(folder)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": 5}', "\x00"])
def test_a_broken_tokenizer_is_told_in_one_line(tmp_path, content):
    folder = planted(tmp_path / "model", tmp_path / "it ran", {})
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(icejax.InputError, match=r"^\S+/model has no tokenizer that loads: \S[^\n]*$"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "change",
    [
        dict(normalizer=dict(type="Precompiled", precompiled_charsmap="AAAA")),
        dict(pre_tokenizer=dict(type="Split", pattern=dict(Regex="(a+)+$"), behavior="Isolated", invert=False)),
    ],
    ids=["at once", "when used"],
)
def test_a_panic_of_the_library_is_told_in_one_line(tmp_path, change):
    shutil.copytree(ASSETS, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    if file.exists():
        fields = json.loads(file.read_text())
    else:
        fields = dict(version="1.0", model=dict(type="WordLevel", vocab={"a": 0}, unk_token="a"))
    file.write_text(json.dumps(fields | change))
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps(dict(tokenizer_class="PreTrainedTokenizerFast")))
    with pytest.raises(icejax.InputError, match=r"^\S+ has no tokenizer that loads: \S[^\n]*$|^the tokenizer fails: [^\n]*$"):
        model, tokenizer = icejax.load(tmp_path / "model")
        icejax.generate(model, tokenizer, "a" * 40 + "b", max_new_tokens=1)


@pytest.mark.slow
def test_a_command_prints_no_line_of_a_panic(tmp_path):
    """The pattern tries all ways to cut a row of a's, of which there are too many."""
    shutil.copytree(ASSETS, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    split = dict(type="Split", pattern=dict(Regex="(a+)+$b"), behavior="Isolated", invert=False)
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(pre_tokenizer=split)))
    command = [sys.executable, "-m", "icejax.generate", "--model", tmp_path / "model", "--quiet", "--prompt"]
    result = subprocess.run([*command, "a" * 40 + "c"], capture_output=True, text=True, timeout=100)
    message = "icejax.generate: error: the tokenizer fails: Onig: Regex search error: retry-limit-in-match over\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", message)


def test_what_else_comes_to_stderr_is_shown(capfd, monkeypatch):
    monkeypatch.setattr(tokenizer_errors, "_files", [])
    tokenizer_errors.own_stderr()
    panic = type("PanicException", (BaseException,), {})
    for round_ in range(2):
        with tokenizer_errors.tokenizer_error_from("it fails"):
            os.write(2, b"a warning\n")
        with pytest.raises(icejax.InputError, match="^it fails: no$"), tokenizer_errors.tokenizer_error_from("it fails"):
            os.write(2, b"an error\n")
            raise ValueError("no")
        with pytest.raises(icejax.InputError, match="^it fails: in Rust$"), tokenizer_errors.tokenizer_error_from("it fails"):
            os.write(2, b"thread panicked\n")
            raise panic("in Rust")
        assert capfd.readouterr().err == "a warning\nan error\n", round_
    with tokenizer_errors.tokenizer_error_from("it fails"):
        tokenizer_errors.show_stderr()  # as Ctrl-C does
        os.write(2, b"interrupted\n")
        assert capfd.readouterr().err == "interrupted\n"
    for file in tokenizer_errors._files:
        os.close(file)


def test_a_tokenizer_that_fails_is_one_line(tmp_path):
    shutil.copytree(ASSETS, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": "x"}))
    model, tokenizer = icejax.load(tmp_path / "model")
    with pytest.raises(icejax.InputError, match="the tokenizer fails: "):
        icejax.generate(model, tokenizer, "import os", max_new_tokens=1)


TEN = [dict(type="Replace", pattern=dict(String="a"), content="a" * 10)]
TWICE = dict(type="TemplateProcessing", single=2 * [dict(Sequence=dict(id="A", type_id=0))], pair=[], special_tokens={})
SQUARE = TWICE | dict(
    single=20 * [dict(SpecialToken=dict(id="s", type_id=0))],
    special_tokens=dict(s=dict(id="s", ids=20 * [1], tokens=20 * ["s"])),
)


@pytest.mark.parametrize(
    "change",
    [
        dict(normalizer=dict(type="Sequence", normalizers=9 * TEN)),
        dict(normalizer=dict(type="Replace", pattern=dict(Regex="a*"), content="a" * 100)),
        dict(decoder=dict(type="Sequence", decoders=9 * TEN)),
        dict(normalizer=TEN[0], post_processor=dict(type="Sequence", processors=4 * [TWICE])),
        dict(post_processor=SQUARE),
    ],
    ids=["replaced", "of nothing", "back", "repeated", "special"],
)
def test_one_that_multiplies_text_is_refused(tmp_path, change):
    shutil.copytree(ASSETS, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(icejax.InputError, match=r"^\S+/model: the tokenizer may lengthen a text \S+ times: [^\n]*$"):
        load_tokenizer(tmp_path / "model")


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "tokenizer.json", "special_tokens_map.json", "additional_chat_templates/rag.jinja"]
)
def test_what_is_no_file_is_told(tmp_path, name):
    shutil.copytree(ASSETS, tmp_path / "model")
    file = tmp_path / "model" / name
    file.unlink(missing_ok=True)
    file.parent.mkdir(exist_ok=True)
    os.mkfifo(file)  # reading a pipe without a writer would never end
    with pytest.raises(
        icejax.InputError,
        match=rf"^{file} is a folder, a pipe or a broken link: expected a file",
    ):
        load_tokenizer(tmp_path / "model")
    file.unlink()
    file.touch()
    os.truncate(file, 2**40)
    with pytest.raises(icejax.InputError, match=f"^{file} has 1099511627776 bytes: expected at most 104857600$"):
        load_tokenizer(tmp_path / "model")


@pytest.mark.parametrize("names", [["../other.json"], ["tokenizer.4.0.0.json", "tokenizer.json"], "x", []])
def test_another_tokenizer_file_is_refused(tmp_path, names):
    """transformers would read it in place of tokenizer.json, outside the folder too."""
    shutil.copytree(ASSETS, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | dict(fast_tokenizer_files=names)))
    with pytest.raises(icejax.InputError, match=rf"^{file}: fast_tokenizer_files is .*: expected tokenizer.json alone; leave"):
        load_tokenizer(tmp_path / "model")
    file.write_text(json.dumps(settings | dict(fast_tokenizer_files=["tokenizer.json"])))
    assert load_tokenizer(tmp_path / "model")("ab").input_ids


def test_one_that_lengthens_text_a_little_loads(tmp_path):
    shutil.copytree(ASSETS, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    change = dict(normalizer=TEN[0], post_processor=TWICE, decoder=dict(type="Sequence", decoders=[*TEN, dict(type="Fuse")]))
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert load_tokenizer(tmp_path / "model")("ab").input_ids == 2 * list(b"a" * 10 + b"b")
