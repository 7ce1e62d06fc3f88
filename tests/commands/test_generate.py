"""`icejax generate`: stdout, stderr and JSON output, and a one-line error for every kind of bad input."""

import io
import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import psutil
import pytest

import icejax
from bench.needle import task
from icejax.api.generate import ASSETS
from icejax.cache.options import make_policy
from icejax.cache.registry import Clustered, Full, Tolerant, name_of, names
from icejax.checks.errors import InputError
from icejax.commands import generate as command
from icejax.commands import options
from icejax.commands.requests import BUNDLED_PROMPT
from icejax.commands.terminal import printer, process
from icejax.engine.response import GenerationResponse, RunReport
from icejax.session import text_cache
from tests.helpers.commands import SHORT, run

FIELDS = set(
    """text reasoning reasoning_content token_ids logprobs prompt_tokens cached_tokens sample new_tokens finish_reason ttft_s compile_s tpot_s prefill_tps decode_tps cache budget device_kv_bytes
    digest_bytes host_kv_bytes full_kv_bytes pages_selected pages_fetched hit_rate estimated_error budget_used expert_hit_rate expert_bytes_per_token fetch_backend device dtype""".split()
)


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch, bundled):
    """The bundled model is loaded once for all tests."""
    load = command.load

    def load_once(arguments, console):
        return bundled if arguments.model is None and arguments.dtype is None else load(arguments, console)

    monkeypatch.setattr(command, "load", load_once)


def optimised(*arguments) -> subprocess.CompletedProcess:
    """Runs the command line in a process with XLA's optimisations, which the test suite turns off."""
    line = [sys.executable, "-m", "icejax.generate", *arguments]
    return subprocess.run(line, env=os.environ | {"XLA_FLAGS": ""}, capture_output=True, text=True)


@pytest.mark.slow
def test_without_arguments_the_bundled_example_is_answered():
    process = optimised()
    prompt = BUNDLED_PROMPT.read_text()
    question = prompt[prompt.rindex("Pass key ") :]
    answer = prompt[prompt.index(question) + len(question) :][:5]
    assert process.returncode == 0 and len(prompt) >= 8000
    assert process.stdout == f"{answer}.\n"
    assert "clustered cache, budget 256" in process.stderr and "KV host" in process.stderr


@pytest.mark.slow
def test_json_has_every_field_and_bytes_of_the_pytree(capsys):
    prompt = BUNDLED_PROMPT.read_text()[-3000:]
    status, out, err = run(capsys, "--prompt", prompt, "--json", "--cache", "clustered", *SHORT)
    report = json.loads(out)
    assert status == 0 and err == "" and set(report) == FIELDS
    assert report["prompt_tokens"] == 3000 and report["new_tokens"] == len(report["token_ids"]) <= 4
    layers, kv_heads, size, item, pages, steps = 4, 2, 64, 4, (3072 + 256) // 16, report["new_tokens"] - 1
    assert report["device_kv_bytes"] == layers * kv_heads * 2 * (32 + 32) * size * item
    slots = kv_heads * (256 - 16 - 1)  # most tokens selected per layer and step: an id and a weight each
    fit = kv_heads * 4 * (3 * size**2 + 2 + size)  # value fit, with the scatter of keys and the channel scales
    page = 4 * size * item + 4 + 4 * 8  # four vectors, a count and eight widths
    assert report["digest_bytes"] == layers * (kv_heads * pages * page + fit + slots * (1 + 1) * 4 + 8)
    assert report["host_kv_bytes"] == layers * kv_heads * 64 * -(-pages // 64) * 16 * 2 * size * item  # whole extents
    assert report["full_kv_bytes"] == layers * kv_heads * 2 * size * item * (3000 + report["new_tokens"])
    keys_fetched = layers * kv_heads * 112 * 16 * steps  # selected values follow; a fetched slot is a key and a value
    assert report["pages_fetched"] == (keys_fetched + report["pages_selected"]) // 2
    assert report["hit_rate"] == 0
    assert 192 * layers * kv_heads * steps <= report["pages_selected"] <= 207 * layers * kv_heads * steps
    assert report["fetch_backend"] == "gather_flat" and report["dtype"] == "float32" and report["budget"] == 256


@pytest.mark.slow
def test_prompts_give_one_json_line_each_as_in_single_runs(capsys, tmp_path):
    prompts = ["def main(arguments):", "Pass key ab:12345.\nimport os\nPass key ab:", "x = 1\n" * 50]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": p}) for p in prompts))
    status, out, _ = run(capsys, "--prompt-file", str(file), "--json", "--cache", "full", *SHORT)
    together = [json.loads(line)["token_ids"] for line in out.splitlines()]
    assert status == 0 and len(together) == 3
    for prompt, expected in zip(prompts, together, strict=True):
        assert json.loads(run(capsys, "--prompt", prompt, "--json", "--cache", "full", *SHORT)[1])["token_ids"] == expected
    status, out, _ = run(capsys, "--prompt-file", str(file), "--json", "--cache", "full", "--batch-size", "2", *SHORT)
    assert [json.loads(line)["token_ids"] for line in out.splitlines()] == together


def test_streamed_whole_and_stdin_texts_are_the_same(capsys, monkeypatch):
    streamed = run(capsys, "--prompt", "import os\n", *SHORT)
    assert streamed[0] == 0
    assert streamed[2] == "cache full: for 14 tokens a step is estimated 0.8 ms faster than with clustered\n"
    assert run(capsys, "--prompt", "import os\n", "--no-stream", *SHORT) == streamed
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"import os\n")))
    assert run(capsys, "--prompt", "-", *SHORT) == streamed


@pytest.mark.slow
def test_seeded_sampling_repeats_and_stop_strings_end_the_text(capsys):
    options = ["--prompt", "import ", "--temperature", "1.5", "--max-new-tokens", "30", "--compile-cache", "none"]
    first = run(capsys, *options, "--seed", "1")
    assert run(capsys, *options, "--seed", "1") == first
    assert run(capsys, *options, "--seed", "2")[1] != first[1]
    stop = first[1][5:8]
    stopped = run(capsys, *options, "--seed", "1", "--stop", stop)[1]
    assert stopped == first[1][: first[1].index(stop)] + "\n"


def test_chat_template_and_system_message_are_used(capsys, tmp_path, monkeypatch):
    shutil.copytree(ASSETS, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    prompts = []

    def record(model, tokenizer, requests, **_):
        prompts.extend((request.prompt, request.special_tokens) for request in requests)
        if len(prompts) % 2 == 0:
            raise InputError("seen")
        return [[1]]

    monkeypatch.setattr("icejax.api.jobs.encode_prompts", record)
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}')
    files = ["--model", str(tmp_path / "chat"), "--prompt-file", str(tmp_path / "p.jsonl")]
    assert run(capsys, *files, "--prompt", "hello", "--chat", "--system", "be brief", *SHORT)[0] == 2
    assert run(capsys, *files, "--prompt", "hello", *SHORT)[0] == 2
    chats = "[user] a\n[assistant] b"
    with_system = [("[system] be brief\n[user] hello\n[assistant]", False), (f"[system] be brief\n{chats}", False)]
    assert prompts == [*with_system, ("hello", True), (chats, False)]


def test_cache_options_reach_the_policy():
    policy = make_policy("clustered", {"budget": 128, "page_size": "8", "sinks": "none", "dense_layers": "1"})
    assert (policy.budget, policy.page_size, policy.sinks, policy.dense_layers) == (128, 8, None, 1)


def test_every_cache_is_made_by_its_name():
    """The values of options are checked by the policy."""
    preset = Clustered(budget=128, page_size=8, rerank=False, tail=False, balance=False, score="mean", group="interleave")
    assert make_policy("icecache", {"budget": 128, "page_size": "8", "sinks": None}) == preset
    assert [name_of(make_policy(name, {})) for name in names()] == names()
    for arguments, message in (
        (("clustered", {"budget": 2.5}), "budget must be a whole number, got 2.5"),
        ((["full"], {}), r"unknown cache \['full'\]: expected one of "),
        (("full", None), "cache options must be a mapping of names to values, got None"),
        (("full", {1: 2}), "cache 'full' has no option 1: it has none"),
        (("full", {"movable": True}), "cache 'full' has no option 'movable': it has none"),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            make_policy(*arguments)


@pytest.mark.parametrize(
    "line, policy",
    [
        ([], None),
        (["--cache", "auto"], None),
        (["--cache", "full"], Full()),
        (["--budget", "64"], Clustered(budget=64)),
        (["--cache", "auto", "--page-size", "8"], Clustered(page_size=8)),
        (["--cache-option", "look=4"], Clustered(look=4)),
        (["--tolerance", "0.05", "--budget", "128"], Tolerant(tolerance=0.05, budget=128)),
    ],
)
def test_options_of_a_cache_mean_clustered(line, policy):
    assert options.policy(options.parser("icejax").parse_args(line)) == policy


def test_options_of_sampling_without_a_temperature_are_told(capsys, tmp_path):
    warning, error = (
        "icejax.generate: warning: %s without --temperature: no effect, the most likely token is taken\n",
        "icejax.generate: error",
    )
    (tmp_path / "p.jsonl").write_text('{"prompt": "x", "temperature": 0.5}')
    for prompt in (["--prompt", "x"], ["--prompt-file", str(tmp_path / "p.jsonl")]):
        for flags, expected in (("--top-p 0.9 --min-p 0.1", warning % "--top-p, --min-p"), ("--repetition-penalty 1.1", error)):
            err = run(capsys, *prompt, "--model", "/no/such", *flags.split())[2]
            assert err.startswith(error if prompt[0] == "--prompt-file" else expected)


BAD_ARGUMENTS = {
    "model of no name": (["--model", "", "--prompt", "x"], ". has no config.json: expected a Hugging Face or icejax checkpoint folder"),
    "stdin twice": (["--prompt", "-", "--prompt", "-"], "--prompt - is given more than once: standard input can be read only once"),
    "stop that is no text": (["--prompt", "x", "--stop", "\udce9"], "a stop string must be Unicode text"),
    "keys first of whole pages": (["--cache-option", "keys_first=true", "--cache-option", "tail=false", *SHORT], "keys_first=true needs tail=true, got False: leave keys_first out"),
    "missing model": (["--model", "/no/such", "--prompt", "x"], "/no/such: expected a checkpoint folder, a GGUF file or a hub id such as org/name, found no such folder"),
    "no prompt": (["--model", str(ASSETS)], "no prompt: give --prompt TEXT"),
    "missing prompt file": (["--prompt-file", "/no/such"], "/no/such cannot be read: No such file or directory"),
    "empty prompt": (["--prompt", ""], "prompt 1 is empty: expected some text"),
    "long prompt": (["--prompt", "x" * 40000], "prompt 1 has 40000 tokens and the context holds 32768, the answer included"),
    "context length": (["--prompt", "x" * 50, "--context-length", "20"], "prompt 1 has 50 tokens and the context holds 20"),
    "no chat template": (["--prompt", "x", "--chat"], "the tokenizer has no chat template: choose a model that has one, or give icejax.generate the prompt as it is (without --chat)"),
    "small budget": (["--prompt", "x", "--budget", "30"], "budget must hold 5 sinks, a window of 21 and a page of 16: at least 42, got 30"),
    "budget no number": (["--prompt", "x", "--budget", "many"], "argument --budget: invalid int value: 'many'"),
    "tolerance of nothing": (["--prompt", "x", "--tolerance", "0"], "tolerance must be a number above 0 and at most 1000, got 0.0"),
    "tolerance of another cache": (["--prompt", "x", "--tolerance", "0.1", "--cache", "full"], "cache 'full' has no option 'tolerance': it has none"),
    "largest budget alone": (["--prompt", "x", "--max-budget", "512"], "--max-budget needs --tolerance"),
    "option no number": (["--prompt", "x", "--cache-option", "sinks=few"], "cache option sinks must be int, got 'few'"),
    "unknown cache": (["--prompt", "x", "--cache", "best"], "unknown cache 'best': expected one of adakv, arkvale, clustered"),
    "score": (["--cache-option", "score=best", *SHORT], "score must be one of second-order, mean, got 'best'"),
    "group": (["--cache-option", "group=vote", *SHORT], "group must be one of sum, max, interleave, got 'vote'"),
    "digests": (["--cache-option", "digest_dtype=int4", *SHORT], "digest_dtype must be one of None, int8, float8_e4m3fn, got 'int4'"),
    "compaction": (["--cache-option", "compact_every=16", *SHORT], "compact_every must be 0 or at least two pages (32), got 16"),
    "candidates": (["--cache-option", "candidates=0", *SHORT], "candidates must be at least 1, got 0"),
    "explain what": (["--explain", "seen.txt", *SHORT], "--explain needs a file that ends in .png, .svg or .pdf, got seen.txt"),
    "explain where": (["--explain", "/no/such/seen.png", *SHORT], "--explain: there is no folder /no/such"),
    "explain full": (["--explain", "seen.png", "--cache", "full", *SHORT], "it needs pages there, as of --cache clustered"),
    "explain two": (["--explain", "seen.png", "--prompt", "a", "--prompt", "b", *SHORT], "--explain needs one prompt, got 2"),
    "explain session": (["--explain", "seen.png", "--session", "kept", *SHORT], "leave --session out"),
    "unknown option": (
        ["--prompt", "x", "--cache-option", "magic=1"],
        "cache 'clustered' has no option 'magic': expected one of budget, page_size, sinks, window, ",
    ),
    "option of another cache": (["--prompt", "x", "--cache", "full", "--budget", "64"], "cache 'full' has no option 'budget': it has none"),
    "option without value": (["--prompt", "x", "--cache-option", "sinks"], "--cache-option must be KEY=VALUE, got 'sinks'"),
    "page size": (["--prompt", "x", "--page-size", "12"], "page_size must be a power of two, got 12"),
    "window": (["--prompt", "x", "--cache-option", "window=16"], "window must be larger than page_size (16), got 16"),
    "negative sinks": (["--prompt", "x", "--cache-option", "sinks=-1"], "sinks must be at least 0, got -1"),
    "temperature": (["--prompt", "x", "--temperature", "-1"], "temperature must be a number from 0 to 1e+06, got -1.0"),
    "new tokens": (["--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens must be at least 1, got 0"),
    "mistyped folder": (["--model", "./modle", "--prompt", "x"], "./modle: expected a checkpoint folder, a GGUF file or a hub id"),
    "no hub id": (["--model", "org/na--me", "--prompt", "x"], "org/na--me: no such folder, and the hub does not bring it"),
    "system without chat": (["--prompt", "x", "--system", "s"], "--system needs --chat"),
    "tiny budget": (["--prompt", "x", "--budget", "3"], "a page of 16: at least 42, got 3"),
    "no context": (["--prompt", "x", "--context-length", "0"], "context_length must be at least 1, got 0"),
    "empty stop string": (["--prompt", "x", "--stop", ""], "a stop string is empty: expected some text"),
    "seed": (["--prompt", "x", "--seed", "99999999999999999999"], "seed must be at most 4294967295, got 99999999999999999999"),
    "not unicode": (["--prompt", "caf\udce9"], "prompt 1 is not UTF-8 text: convert it first"),
    "second prompt": (["--prompt", "x", "--prompt", "", "--batch-size", "1"], "prompt 2 is empty: expected some text"),
    "budget beyond counting": (["--prompt", "x", "--budget", "3000000000"], "budget must be at most 1073741824, got 3000000000"),
    "sinks beyond counting": (["--cache-option", "sinks=1000000000"], "sinks must be at most 1048576, got 1000000000"),
    "page size beyond counting": (["--page-size", str(2**40)], "page_size must be at most 128, got 1099511627776"),
    "sinks without a budget": (["--cache-option", "sinks=1000000"], "a page of 16: at least 1000048, got 256"),
    "context beyond counting": (["--prompt", "x", "--context-length", str(10**12)], "context_length must be at most 16777216, got 1000000000000"),
    "temperature no number": (["--prompt", "x", "--temperature", "nan"], "temperature must be a number from 0 to 1e+06, got nan"),
    "very long prompt": (["--prompt", "x" * 30_000_000], "prompt 1 has at least 131072 tokens and the context holds 32768, the answer included"),
    "batch size": (["--prompt", "x", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
    "dtype": (["--prompt", "x", "--dtype", "int4"], "dtype must be one of float32, bfloat16, float16, got 'int4'"),
    "unknown flag": (["--promt", "x"], "unrecognized arguments: --promt (did you mean --prompt?)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_input_is_one_line_and_status_2(capsys, case):
    arguments, message = BAD_ARGUMENTS[case]
    status, out, err = run(capsys, *arguments)
    assert status == 2 and out == ""
    assert err.startswith("icejax.generate: error: ") and message in err
    assert err.count("\n") == 1 and "Traceback" not in err


BAD_FILES = {
    "not utf-8": ("p.txt", b"caf\xe9", "is not UTF-8 text (byte 3): convert it first"),
    "empty": ("p.txt", b"", "prompt 1 is empty"),
    "broken jsonl": ("p.jsonl", b'{"prompt": "a"}\n{"prompt"', "line 2: not valid JSON (Expecting ':' delimiter"),
    "jsonl without prompt": ("p.jsonl", b'{"text": "a"}', "line 1: unknown key 'text': expected prompt, messages, tools"),
    "deep jsonl": ("p.jsonl", b'{"prompt": ' + b"[" * 100_000, "line 1: not valid JSON here (nested too deeply)"),
    "jsonl of lists": ("p.jsonl", b'{"prompt": "a"}\n[1]', "line 2: expected a JSON object, found a list"),
    "jsonl of numbers": ("p.jsonl", b"7", "line 1: expected a JSON object, found a int"),
    "jsonl prompt is no text": (
        "p.jsonl",
        b'{"prompt": ["a"]}',
        "line 1: 'prompt' must be text, got ['a']",
    ),
    "jsonl of many digits": ("p.jsonl", b'{"prompt": ' + b"9" * 5000 + b"}", "line 1: not valid JSON (Exceeds the limit"),
    "empty jsonl": ("p.jsonl", b"\n", "holds no prompt: expected one JSON object with 'prompt' or 'messages' per line"),
}


@pytest.mark.parametrize("name, content", [("p.jsonl", b'{"prompt": "ab"}'), ("p.txt", b"ab")])
def test_a_byte_order_mark_is_no_text(capsys, tmp_path, name, content):
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
    status, out, _ = run(capsys, "--prompt-file", str(tmp_path / name), "--cache", "full", "--json", *SHORT)
    assert status == 0 and json.loads(out)["prompt_tokens"] == 2


def test_jsonl_may_hold_any_character_of_a_line(capsys, tmp_path):
    text = "a\u2028b\x85c"
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": text}, ensure_ascii=False))
    status, out, _ = run(capsys, "--prompt-file", str(tmp_path / "p.jsonl"), "--json", *SHORT)
    assert status == 0 and json.loads(out)["prompt_tokens"] == len(text.encode())


def test_a_warning_comes_behind_the_answer_it_falls_into(capsys, monkeypatch, bundled):
    def warning_stream(*arguments, **options):
        for piece in icejax.stream_generate(*arguments, **options):
            yield piece
            process.LOG.warning("the disk is full")

    events = []
    monkeypatch.setattr(command, "load", lambda *_: bundled)
    monkeypatch.setattr(command, "stream_generate", warning_stream)
    monkeypatch.setattr(printer, "write", lambda text, write=process.write: (events.append(text), write(text)))
    monkeypatch.setattr(process, "_complain", events.append)
    assert run(capsys, "--prompt", "import", "--cache", "full", *SHORT)[0] == 0
    assert len(events) > 4 and events[-2:] == ["\n", "icejax.generate: warning: the disk is full"]


def test_stdin_of_another_encoding_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    status, out, err = run(capsys, "--prompt", "-", *SHORT)
    assert (status, out, err) == (2, "", "icejax.generate: error: stdin is not UTF-8 text (byte 3): convert it first\n")


def copy_of_bundled(folder):
    shutil.copytree(ASSETS, folder)
    return folder


def test_a_template_that_refuses_the_messages(capsys, tmp_path):
    folder = copy_of_bundled(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only user turns') }}")
    status, out, err = run(capsys, "--model", str(folder), "--prompt", "x", "--chat", *SHORT)
    assert (status, out, err.count("\n")) == (2, "", 1) and "chat template refuses the messages: only user turns" in err


def test_a_broken_tokenizer_and_one_of_another_model(capsys, tmp_path):
    folder = copy_of_bundled(tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["a"] = 300
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    status, out, err = run(capsys, "--model", str(folder), "--prompt", "a", *SHORT)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "prompt 1 has token 300 and the model knows 257: the tokenizer is not the model's" in err
    (folder / "tokenizer.json").write_text("{}")
    status, out, err = run(capsys, "--model", str(folder), "--prompt", "a", *SHORT)
    assert (status, out, err.count("\n")) == (2, "", 1) and "has no tokenizer that loads" in err


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_prompt_files(capsys, tmp_path, case):
    name, content, message = BAD_FILES[case]
    (tmp_path / name).write_bytes(content)
    status, out, err = run(capsys, "--prompt-file", str(tmp_path / name))
    assert (status, out, err.count("\n")) == (2, "", 1) and message in err


def test_too_little_host_memory_is_told_before_prefill(capsys, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000, "total": 2**34})())
    monkeypatch.setattr("icejax.engine.prefill._prefill_layer", lambda *_, **__: pytest.fail("prefill began"))
    status, out, err = run(capsys, "--prompt", "x", "--cache", "clustered", *SHORT)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "of host memory and 0.0 GiB is free: use a shorter prompt" in err


@pytest.mark.slow
def test_host_memory_limit_is_told_before_prefill(capsys):
    prompt = BUNDLED_PROMPT.read_text()[-3000:]
    status, out, err = run(capsys, "--prompt", prompt, "--host-memory-limit", "0.001", "--cache", "clustered", *SHORT)
    assert (status, out) == (2, "") and len(err.splitlines()) == 1
    assert "GiB of host memory and the limit is 0.001 GiB: use a shorter prompt" in err
    assert run(capsys, "--prompt", prompt, "--host-memory-limit", "1", *SHORT)[0] == 0
    for limit in ("0", "nan", "inf"):
        status, _, err = run(capsys, "--prompt", prompt, "--host-memory-limit", limit, *SHORT)
        assert status == 2 and f"--host-memory-limit must be a number above 0 and at most 1e+09, got {float(limit)}" in err


OUT_OF_MEMORY = (
    (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes"), "the device"),
    (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of host memory: xla_gpu_host_bfc"), "the host"),
    (MemoryError(), "the host"),
)


@pytest.mark.slow
def test_out_of_memory_is_one_line_and_leaves_the_session(capsys, tmp_path, monkeypatch):
    options = ["--session", str(tmp_path / "kept"), *SHORT]
    first = run(capsys, "--prompt", "Pass key ab:12345.\nPass key ab:", "--context-length", "2000", *options)
    assert first[0] == 0
    before = (tmp_path / "kept" / "session.json").read_text()
    for error, side in OUT_OF_MEMORY:

        def fail(*_, error=error, **__):
            raise type(error)(*error.args)  # a new instance: a traceback would keep arrays alive

        with monkeypatch.context() as patch:
            patch.setattr(text_cache, "extend", fail)
            status, _, err = run(capsys, "--prompt", "Pass key ab:", *options)
        assert status == 2 and len(err.splitlines()) == 1
        assert f"out of memory on {side}" in err
        assert f"{tmp_path / 'kept'} holds the session up to its last whole answer" in err
        assert (tmp_path / "kept" / "session.json").read_text() == before
    assert run(capsys, "--prompt", "Pass key ab:", *options)[0] == 0


@pytest.mark.slow
def test_two_processes_draw_the_same_text(capsys):
    prompt = BUNDLED_PROMPT.read_text()[-1500:]
    options = ["--prompt", prompt, "--json", "--temperature", "1", "--seed", "7", "--max-new-tokens", "60", "--budget", "64"]
    command_line = [sys.executable, "-m", "icejax.generate", "--compile-cache", "none", *options]
    reports = [json.loads(run(capsys, *options, "--compile-cache", "none")[1])]
    reports += [json.loads(subprocess.run(command_line, capture_output=True, text=True, check=True).stdout)]
    assert len({(tuple(report["token_ids"]), report["pages_selected"]) for report in reports}) == 1


def test_response_is_documented():
    documented = GenerationResponse.__doc__ + RunReport.__doc__
    assert all(name in documented for name in FIELDS)


@pytest.mark.slow
def test_device_part_of_32k_is_under_15_percent_of_full(tmp_path):
    text = BUNDLED_PROMPT.read_text() * 3
    (tmp_path / "book.txt").write_text(text[:32000])
    process = optimised("--prompt-file", str(tmp_path / "book.txt"), "--cache", "clustered", "--json", *SHORT)
    report = json.loads(process.stdout)
    assert process.returncode == 0 and report["prompt_tokens"] == 32000
    assert report["device_kv_bytes"] + report["digest_bytes"] < 0.15 * report["full_kv_bytes"]


@pytest.mark.slow
def test_a_session_goes_on_from_the_shell(capsys, tmp_path):
    context = task.context(np.random.default_rng(4), length=1200, facts=task.Facts(keys=3), split="heldout")
    (tmp_path / "document.txt").write_bytes(context.text)
    session_option = ("--session", str(tmp_path / "kept"))
    first_options = ["--max-new-tokens", "1", "--budget", "64", "--context-length", "2000"]
    status, out, _ = run(capsys, "--prompt-file", str(tmp_path / "document.txt"), *session_option, *first_options)
    assert status == 0 and len(out) <= 2
    for question in context.questions[:2]:
        assert run(capsys, "--prompt", question.text, *session_option) == (0, question.answer + "\n", "")
    two_prompts = [argument for question in context.questions[1:] for argument in ("--prompt", question.text)]
    assert run(capsys, *two_prompts, *session_option)[1] == "".join(q.answer + "\n" for q in context.questions[1:])
    assert run(capsys, "--prompt", "x", *session_option, "--budget", "128")[0] == 2
    status, _, err = run(capsys, "--prompt", "x", *session_option, "--context-length", "5000")
    assert status == 2 and "kept holds plain text, whose context length of 2000 stays: leave context_length out" in err
    assert run(capsys, "--prompt", "x", "--session", str(tmp_path))[0] == 2
