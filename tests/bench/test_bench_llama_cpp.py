"""`bench.llama_cpp`: both programs get the same tokens, and the table has their figures."""

import copy
import json
import shutil
import subprocess

import pytest

from bench import llama_cpp
from icejax.checks.errors import InputError


def test_llama_cpps_job_and_figures(monkeypatch):
    jobs = []

    def node(command, *, input, **_):
        jobs.append((command[-1], json.loads(input)))
        runs = [dict(answer=[5, 6, 7], seconds=[2.0, 0.5, 0.25]), dict(answer=[5, 6, 7], seconds=[3.0, 0.125, 0.375])]
        return subprocess.CompletedProcess(command, 0, json.dumps(dict(runs=runs, peak_rss_bytes=9)), "")

    monkeypatch.setattr(subprocess, "run", node)
    found = llama_cpp.theirs("llama.cpp q8_0, flash attention", "/folder", "m.gguf", [1, 2, 3], 2, 2)
    [(folder, job)] = jobs
    assert folder == "/folder" and job.pop("threads") >= 1
    assert job == dict(model="m.gguf", tokens=[1, 2, 3], new_tokens=2, repeats=2, cache_type="Q8_0", flash_attention=True)
    assert (found["ttft_s"], found["tpot_s"], found["peak_rss_bytes"]) == ([2.0, 3.0], [0.375, 0.25], 9)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, "", "no\nmodel"))
    with pytest.raises(InputError, match="^llama.cpp fails: no model$"):
        llama_cpp.theirs("llama.cpp f16", "/folder", "m.gguf", [1], 2, 2)


def test_a_table_has_a_row_per_subject_and_a_column_per_length(capsys, tmp_path):
    base = dict(model="m", tpot_s=0.0255, peak_rss_bytes=1.5e9)
    rows = [
        base | dict(subject="icejax full", length=512, ttft_s=0.618),
        base | dict(subject="icejax full", length=4096, ttft_s=6.6),
        base | dict(subject="llama.cpp f16", length=512, ttft_s=1.0),
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert llama_cpp.main(["--page", str(tmp_path / "rows.jsonl")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "### m",
        "",
        "|  | 512: first token, s; ms per token; peak, GB | 4,096: first token, s; ms per token; peak, GB |",
        "|---|---|---|",
        "| icejax full | 0.62; 25.5; 1.50 | 6.60; 25.5; 1.50 |",
        "| llama.cpp f16 | 1.00; 25.5; 1.50 | - |",
        "",
    ]


def test_the_prompt_is_the_first_tokens_of_the_source(bundled):
    _, tokenizer = bundled
    ids = llama_cpp.text_tokens(tokenizer, 900)
    assert len(ids) == 900 and tokenizer.decode(ids) in (llama_cpp.ROOT / "icejax" / "__init__.py").read_text()
    with pytest.raises(InputError, match=r"^icejax's source code has \d+ tokens: expected a smaller number than 100000000$"):
        llama_cpp.text_tokens(tokenizer, 10**8)


def test_a_chat_is_a_file_in_the_template(bundled, tmp_path):
    tokenizer = copy.deepcopy(bundled[1])
    tokenizer.chat_template = "Q: {{ messages[0].content }}\nA:"
    (tmp_path / "question.txt").write_text("Why?")
    assert tokenizer.decode(llama_cpp.prompt_tokens(tokenizer, tmp_path / "question.txt")) == "Q: Why?\nA:"
    assert llama_cpp.prompt_tokens(tokenizer, 9) == llama_cpp.text_tokens(tokenizer, 9)


@pytest.mark.parametrize(
    "line, message",
    [
        (["--models", "gpt"], "--models must be of smollm2-135m, qwen2.5-coder-0.5b, gemma-3-270m, got 'gpt'"),
        (["--subjects", "icejax full;ollama"], "--subjects must be of icejax full; icejax clustered; "),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--chat", "/no/such"], "--chat must be a text file, found none at /no/such"),
        (["--page", "/no/such"], "No such file or directory"),
    ],
)
def test_bad_input_is_one_line(capsys, line, message):
    with pytest.raises(SystemExit) as end:
        llama_cpp.main(line)
    err = capsys.readouterr().err
    assert end.value.code == 2 and message in err and err.count("\n") == 1


def test_a_machine_without_node_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda program: None)
    with pytest.raises(
        InputError, match="^llama.cpp runs in Node.js, and node is not installed: install it, or name other --subjects$"
    ):
        llama_cpp.install()
