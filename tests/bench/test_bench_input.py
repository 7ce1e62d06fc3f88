"""Bad options of the commands of bench/ end with status 2 and one line that says what was expected, before anything runs."""

import importlib
from pathlib import Path

import pytest

from tests.helpers import chat_templates, families

BAD = {
    "attention.pages --lengths abc": "--lengths must be whole numbers, comma-separated, got 'abc'",
    "attention.pages --budgets x": "--budgets must be whole numbers, comma-separated, got 'x'",
    "attention.pages --lengths 4096 --budgets 4000": "--budgets must be at most 2048, got 4000",
    "attention.pages --model /nosuch": "/nosuch: expected a checkpoint folder, a GGUF file or a hub id such as org/name, found no such folder",
    "attention.pages --prompts 0": "--prompts must be at least 1, got 0",
    "attention.pages --formations any": "--formations must be of ",
    "attention.pages --uneven nan": "--uneven must be a number from 0 to 10, got nan",
    "attention.code_errors --bits 5": "--bits must be of 2, 3, 4, 8, got '5'",
    "attention.code_errors --length 100": "--length must be at least 512, got 100",
    "attention.code_errors --steps 2": "--steps must be at least 4, got 2",
    "attention.code_errors --texts novels": "--texts must be of code, documentation, licence, prose, got 'novels'",
    "attention.code_reads --pages 100": "--pages must be at least 160, got 100",
    "attention.two_precisions --exact -1": "--exact must be at least 0, got -1",
    "attention.two_precisions --lengths 100": "--lengths must be at least 512, got 100",
    "attention.two_precisions --budgets 32": "--budgets must be at least 64, got 32",
    "attention.two_precisions --bits 5": "--bits must be of 1, 2, 3, 4, 8, ",
    "attention.two_precisions --pages few": "--pages must be whole numbers, comma-separated, got 'few'",
    "attention.two_precisions --texts novels": "--texts must be of code, documentation, licence, prose, got 'novels'",
    "attention.two_precisions --scales int4": "--scales must be of ",
    "attention.two_precisions --tile 1000": "--tile must be at least 4096, got 1000",
    "attention.two_precisions --opened 0": "--opened must be at least 1, got 0",
    "attention.two_precisions --policies kivi --tile 8192": "--policies needs texts, got --tile",
    "attention.two_precisions --policies q8_1": "unknown cache 'q8_1': expected one of ",
    "attention.two_precisions --policies kivi:bits=3": "bits must be one of 2, 4, got 3",
    "attention.two_precisions --model /nosuch": "/nosuch: expected a checkpoint folder, a GGUF file or a hub id such as org/name, found no such folder",
    "attention.sharing --length 10": "--length must be at least 512, got 10",
    "attention.sharing --length 16001": "--length must be at most 16000, got 16001",
    "attention.sharing --budgets x": "--budgets must be whole numbers, comma-separated, got 'x'",
    "needle.language --model /nosuch": "/nosuch: expected a checkpoint folder, a GGUF file or a hub id such as org/name, found no such folder",
    "needle.language --length 1": "--length must be at least 65, got 1",
    "needle.evaluate --seed -1": "--seed must be at least 0, got -1",
    "needle.evaluate --questions 0": "--questions must be at least 1, got 0",
    "needle.evaluate --panel --model other/qwen3": "other/qwen3 must have another name than the panel's adamw, mha, qwen3, ",
    "needle.evaluate --cache full --budget 64": "cache 'full' has no option 'budget': it has none",
    "compare.__main__ --budgets inf%": "--budgets must be numbers of tokens or shares such as 10%, got 'inf%'",
    "compare.__main__ --budgets 0 --policies topp": "--budgets must be numbers of tokens or shares such as 10%, got '0'",
    "compare.__main__ --policies full --out FILE": "results must go to a folder, FILE cannot be one: File exists",
    "compounding.__main__ --new-tokens 100": "--new-tokens must be a multiple of 16, got 100",
    "compounding.__main__ --length 100": "--length must be at least 576, got 100",
    "compounding.__main__ --seeds one": "--seeds must be whole numbers, comma-separated, got 'one'",
    "compounding.__main__ --policies vattention:seed=1": "--policies must leave the seed to --seeds, got vattention:seed=1",
    "compounding.__main__ --policies misplaced:share=2": "share must be a number from 0 to 1, got 2.0",
    "compounding.__main__ --policies quest --budgets 8": "--budgets must hold one that a policy can have: quest, budget 8 of ",
    "compounding.__main__ --page": "--page needs --out, the folder of the lines",
    "compounding.__main__ --page --out none": "none/compounding.jsonl must hold lines of bench.compounding: it has none",
    "decode --contexts 0": "--contexts must be at least 1, got 0",
    "decode --steps 0": "--steps must be at least 1, got 0",
    "decode --plot FILE/x.png": "results must go to a folder, FILE cannot be one: File exists",
    "decode --dtype int3": "--dtype must be one of float32, bfloat16, float16, got 'int3'",
    "decode --shape bundled --layers 2": "--layers is for random weights of a shape",
    "decode --layers 0": "--layers must be at least 1, got 0",
    "memory --model x --caches fulll": "--caches must be of adakv, ",
    "memory --model x --words 0": "--words must be at least 1, got 0",
    "prefill --dtype int3": "--dtype must be one of float32, bfloat16, float16, got 'int3'",
    "prefill --lengths 0": "--lengths must be at least 1, got 0",
    "prefill --shape qwen3-30b-a3b --policies transformers": "transformers is timed with Llama's layers, and this shape is qwen3_moe's",
    "followup --behind 0": "--behind must be at least 1, got 0",
    "followup --policies quest": "--policies must be of full, clustered, coded, got 'quest'",
    "followup --model /nosuch": "/nosuch: expected a checkpoint folder, a GGUF file or a hub id such as org/name, found no such folder",
    "start --caches some": "--caches must be of ",
    "start --repeats 0": "--repeats must be at least 1, got 0",
    "start --new-tokens 2": "--new-tokens must be at least 3, got 2",
    "start --model /nosuch": "/nosuch: expected a checkpoint folder, a GGUF file or a hub id such as org/name, found no such folder",
    "engine.__main__ --parts some": "--parts must be of batch, prefill, lines, prefix, got 'some'",
    "engine.__main__ --repeats 0": "--repeats must be at least 1, got 0",
    "engine.__main__ --batch 1": "--batch must be at least 2, got 1",
    "engine.__main__ --least-prompt 3000": "--least-prompt must be at most --most-prompt, 2000, got 3000",
    "engine.__main__ --cache fulll": "unknown cache 'fulll': expected one of ",
    "engine.__main__ --model /nosuch": "/nosuch: expected a checkpoint folder, a GGUF file or a hub id such as org/name, found no such folder",
    "weights --shape attention --dtype int3": "dtype must be one of float32, bfloat16, float16, got 'int3'",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_a_line(line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("FILE").touch()
    name, *arguments = line.split()
    try:
        status = importlib.import_module(f"bench.{name}").main(arguments)
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert status == 2 and not out and BAD[line] in err.splitlines()[-1] and "Traceback" not in err
    assert [path.name for path in Path().iterdir()] == ["FILE"]


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """A model whose tokenizer is not of bytes."""
    folder = tmp_path_factory.mktemp("others")
    families.save(families.build(families.row("llama-gqa"), vocab_size=300), folder)
    chat_templates.tokenizer("qwen2.5").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "name, message",
    [
        *((name, "must have a tokenizer of bytes") for name in ("needle.evaluate", "needle.language", "attention.sharing")),
        *((name, "too few questions of at most 64 tokens") for name in ("attention.pages", "attention.calibrate")),
    ],
)
def test_tokens_that_a_bench_cannot_take_are_refused(name, message, others, capsys):
    try:
        status = importlib.import_module(f"bench.{name}").main(["--model", str(others)])
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert status == 2 and not out and message in err.splitlines()[-1]
