"""Loading and converting checkpoint folders: bit-exact round trips, one-line errors for faults, no half-written folders."""

import json
import os
import re
import shutil
import sys

import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

import icejax.checkpoint.convert as converters
from icejax.cache.registry import Full
from icejax.checkpoint import load_model
from icejax.checkpoint.folder import ORBAX
from icejax.checkpoint.readers import huggingface
from icejax.checks.errors import InputError
from icejax.commands import generate
from icejax.files.atomic_folder import claim
from icejax.runtime import devices
from tests import tolerances
from tests.helpers import families
from tests.helpers.checkpoints import convert, edit, same_arrays
from tests.helpers.crash import file_limit
from tests.helpers.run import all_logits

KEY = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path):
    """A valid, sharded Hugging Face folder in bf16."""
    model = families.build(families.row("llama-gqa")).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "hf", max_shard_size="60KB")
    return tmp_path / "hf"


def test_sharded_and_single_files_load_alike(folder):
    assert len(list(folder.glob("*.safetensors"))) > 2
    sharded = load_model(folder, dtype="bfloat16")
    edit(folder, lambda tensors: None)
    assert same_arrays(sharded, load_model(folder, dtype="bfloat16"))


def test_progress_names_every_parameter_once(folder):
    calls = []
    model = load_model(folder, progress=lambda key, done, total: calls.append((key, done, total)))
    count = len(jax.tree.leaves(model))
    assert len({key for key, _, _ in calls}) == count and calls[-1][1:] == (count, count)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_is_what_was_asked_for(folder, dtype, monkeypatch):
    monkeypatch.setattr(devices, "platform", lambda: "gpu")  # on a CPU, bfloat16 matrices become bits
    leaves = jax.tree.leaves(load_model(folder, dtype=dtype))
    assert {leaf.dtype for leaf in leaves} == {np.dtype(jax.numpy.dtype(dtype))}


def test_matrices_in_bfloat16_are_bits_on_a_cpu(folder, monkeypatch):
    """The error against fp32 logits is less than 1.2 times that of bf16 matrices."""
    model = load_model(folder, dtype="bfloat16")
    with monkeypatch.context() as patch:
        patch.setattr(devices, "platform", lambda: "gpu")
        plain = load_model(folder, dtype="bfloat16")
    bits = model.model.layers[1].mlp.up_proj.weight.get_value()
    stored = plain.model.layers[1].mlp.up_proj.weight[...]
    assert bits.codes.dtype == "uint16" and model.model.norm.weight[...].dtype == model.dtype == "bfloat16"
    np.testing.assert_array_equal(np.asarray(bits.weights("float32"))[:, 0], np.asarray(stored, np.float32))
    prompt = families.tokens(40)
    exact = all_logits(load_model(folder, dtype="float32"), prompt, Full())
    errors = (np.abs(all_logits(loaded, prompt, Full()) - exact).mean() for loaded in (model, plain))
    assert next(errors) < 1.2 * next(errors)


def test_all_faults_are_told_together(folder):
    def change(tensors):
        tensors["model.extra.weight"] = tensors.pop(KEY)
        tensors["model.norm.weight"] = np.zeros(7, np.float32)

    edit(folder, change)
    with pytest.raises(InputError) as error:
        load_model(folder)
    message = str(error.value)
    assert "model.extra.weight is not a parameter of this model" in message
    assert "model.norm.weight has shape [7], expected [64]" in message
    assert f"{KEY} is missing" in message
    assert "\n" not in message


def test_old_rotary_tables_and_other_packagings_are_passed_over(folder):
    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)

    edit(folder, change)
    save_file({"anything": np.zeros(1)}, folder / "consolidated.safetensors")
    load_model(folder)


@pytest.mark.parametrize("name", ["deepseek_v3-yarn", "glm4_moe-plain"])
def test_they_are_passed_over_beside_layers_that_guess(tmp_path, name):
    families.save(families.build(families.row(name)), tmp_path)
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    edit(tmp_path, lambda tensors: tensors.update(table))
    load_model(tmp_path)


OWN_HEADS = ("qwen2-tied", "llama-gqa", "qwen3-plain", "mistral-plain", "gemma2-plain", "gemma3_text-plain")


@pytest.mark.parametrize("name", [OWN_HEADS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in OWN_HEADS[1:])])
def test_a_head_beside_a_tied_config_is_used(name, tmp_path):
    """As in transformers; converted folders keep it."""
    theirs = families.build(families.row(name), tie_word_embeddings=False)
    families.save(theirs, tmp_path / "hf")
    families.edit_config(tmp_path / "hf", tie_word_embeddings=True)
    prompt = families.tokens(40)
    with torch.no_grad():
        reference = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
        expected = reference(torch.tensor([prompt])).logits[0].numpy()
    assert convert("hf_to_orbax", [str(tmp_path / "hf"), str(tmp_path / "orbax")]) == 0
    for folder in ("hf", "orbax"):
        ours = load_model(tmp_path / folder)
        assert not ours.config.tie_word_embeddings
        np.testing.assert_allclose(all_logits(ours, prompt, Full()), expected, rtol=0, atol=tolerances.LOGITS)


def test_a_tied_head_is_dropped_if_it_equals_the_embedding(tmp_path):
    model = families.build(families.row("qwen2-tied"))
    families.save(model, tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}))
    assert load_model(tmp_path).config.tie_word_embeddings
    embedding = model.model.embed_tokens.weight.detach().numpy()
    for head in (np.zeros((), np.float32), embedding[:0], embedding[:3], np.concatenate([embedding, embedding[:9]])):
        edit(tmp_path, lambda tensors, head=head: tensors.update({"lm_head.weight": head.copy()}))
        message = f"lm_head.weight has shape {list(head.shape)}, expected {list(embedding.shape)}"
        with pytest.raises(InputError, match=re.escape(message)):
            load_model(tmp_path)


def test_a_lora_is_called_one(tmp_path, capsys, caplog):
    adapter = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/base"})
    families.save(families.build(families.row("llama-gqa"), num_hidden_layers=1), tmp_path / "whole")
    (tmp_path / "whole" / "adapter_config.json").write_text(adapter)
    load_model(tmp_path / "whole")
    assert caplog.messages == [f"{tmp_path / 'whole'}: the LoRA adapter (adapter_config.json) is not used"]
    capsys.readouterr()
    lora = tmp_path / "lora"
    lora.mkdir()
    (lora / "adapter_config.json").write_text(adapter)
    (lora / "adapter_model.safetensors").write_bytes(b"")
    assert generate.main(["--model", str(lora), "--prompt", "x", "--max-new-tokens", "1"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == (
        f"icejax.generate: error: {lora} is a LoRA adapter of 'org/base', not a model: merge it into that model by peft's "
        "merge_and_unload, and give the folder of the result\n"
    )


def _truncate(folder):
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])


BROKEN = {
    "missing shard": (
        lambda f: sorted(f.glob("*.safetensors"))[0].unlink(),
        "is named in model.safetensors.index.json and missing",
    ),
    "extra shard": (lambda f: save_file({"x": np.zeros(1)}, f / "model-9.safetensors"), "model-9.safetensors is not named in"),
    "truncated shard": (_truncate, "is not a whole safetensors file"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "expected a JSON object, found a list"),
    "no weights": (
        lambda f: [p.unlink() for p in [*f.glob("*.safetensors"), f / huggingface.INDEX]],
        "expected one .safetensors",
    ),
    "two files and no index": (lambda f: (f / huggingface.INDEX).unlink(), "or several with an index .*, found"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused(folder, case):
    change, message = BROKEN[case]
    change(folder)
    with pytest.raises(InputError, match=message) as error:
        load_model(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "path, message",
    [
        ("nowhere/at/all", "found no such folder"),
        ("org/name", "HF_HUB_OFFLINE forbids the network"),
        ("empty", "is empty"),
        ("~nobody-here/x", "^~nobody-here/x cannot be read: Could not determine home directory"),
        ("x" * 300, "cannot be read: .*File name too long"),
        ("a\0b", "cannot be read: .*null"),
    ],
)
def test_a_model_that_is_not_there(tmp_path, monkeypatch, path, message):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        load_model(path)


def test_a_tensor_in_two_shards_is_refused(folder):
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    key, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {key: tensor}, second)
    with pytest.raises(InputError, match=f"{key} is stored twice"):
        load_model(folder)


def test_unknown_dtype_is_refused(folder):
    with pytest.raises(InputError, match="dtype must be one of float32, bfloat16, float16, got 'int8'"):
        load_model(folder, dtype="int8")


def test_round_trip_is_bit_exact_and_transformers_loads_it(folder, tmp_path, capsys):
    assert convert("hf_to_orbax", [str(folder), str(tmp_path / "orbax")]) == 0
    assert convert("orbax_to_hf", [str(tmp_path / "orbax"), str(tmp_path / "back")]) == 0
    lines = []
    for target, form in ((tmp_path / "orbax", "an icejax (Orbax)"), (tmp_path / "back", "a Hugging Face")):
        size = sum(os.path.getsize(os.path.join(place, file)) for place, _, files in os.walk(target) for file in files)
        lines.append(f"wrote {target}: {form} folder of {size / 2**20:.1f} MiB")
    assert capsys.readouterr().out.splitlines() == lines
    stored = {}
    for shard in folder.glob("*.safetensors"):
        stored |= load_file(shard)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert stored.keys() == back.keys()
    for key in stored:
        assert stored[key].dtype == back[key].dtype
        np.testing.assert_array_equal(stored[key].view(np.uint16), back[key].view(np.uint16))
    assert (tmp_path / "back" / "config.json").read_text() == (folder / "config.json").read_text()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    ours = load_model(tmp_path / "orbax", dtype="float32")
    prompt = families.tokens(30)
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0].numpy()
    np.testing.assert_allclose(all_logits(ours, prompt, Full()), expected, rtol=0, atol=tolerances.LOGITS)


def test_large_checkpoints_are_written_in_shards_with_an_index(tmp_path):
    tensors = {name: np.full((10, 10), i, np.float32) for i, name in enumerate("abcde")}
    pieces = [(key, start, tensors[key][start : start + 6]) for key in reversed(tensors) for start in (6, 0)]
    huggingface.write(tmp_path, dict.fromkeys(tensors, ((10, 10), "F32")), pieces, shard_bytes=1000)
    files = huggingface.shards(tmp_path)
    assert [f.name for f in files] == [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    for key, file, _, _ in huggingface.keys(files):
        np.testing.assert_array_equal(huggingface.read_tensor(file, key), tensors[key])
    assert json.loads((tmp_path / huggingface.INDEX).read_text())["metadata"]["total_size"] == 2000


@pytest.mark.parametrize("damage", ["data", "metadata"])
def test_a_damaged_orbax_folder_is_told_in_one_line(folder, tmp_path, damage):
    assert convert("hf_to_orbax", [str(folder), str(tmp_path / "orbax")]) == 0
    if damage == "data":
        for file in (tmp_path / "orbax" / ORBAX).rglob("d/*"):
            os.truncate(file, 100)
    else:
        file = tmp_path / "orbax" / ORBAX / "_METADATA"
        fields = json.loads(file.read_text())
        for metadata in fields["tree_metadata"].values():
            metadata["value_metadata"]["skip_deserialize"] = True
        file.write_text(json.dumps(fields))
    with pytest.raises(InputError, match=r"^\S+ is not a whole Orbax checkpoint \([^\n]+\): convert it again$"):
        load_model(tmp_path / "orbax")


def _link_to_dev_zero(folder):
    (folder / "_METADATA").unlink()
    (folder / "_METADATA").symlink_to("/dev/zero")


NOT_FILES = {
    "pipe": (lambda f: (f / "manifest.ocdbt").unlink() or os.mkfifo(f / "manifest.ocdbt"), "manifest.ocdbt is no file"),
    "endless": (_link_to_dev_zero, "_METADATA is no file"),
    "large": (lambda f: os.truncate(f / "_METADATA", 2**40), "_METADATA has 1099511627776 bytes"),
    "elsewhere": (lambda f: (f / "more").symlink_to(f.parent), "more is a link to a folder"),
}


@pytest.mark.parametrize("case", NOT_FILES)
def test_what_orbax_would_wait_for_is_told(folder, tmp_path, case):
    change, message = NOT_FILES[case]
    assert convert("hf_to_orbax", [str(folder), str(tmp_path / "orbax")]) == 0
    change(tmp_path / "orbax" / ORBAX)
    with pytest.raises(InputError, match=rf"^\S+ is not a whole Orbax checkpoint \(\S+{message}\): convert it again$"):
        load_model(tmp_path / "orbax")


def test_what_is_no_file_is_not_copied(folder, tmp_path, capsys):
    (folder / "merges.txt").symlink_to("/dev/zero")
    assert convert("hf_to_orbax", [str(folder), str(tmp_path / "orbax")]) == 2
    message = f"{folder}/merges.txt is a folder, a pipe or a broken link: expected a file, or nothing of this name\n"
    assert capsys.readouterr().err == f"convert.hf_to_orbax: error: {message}" and not (tmp_path / "orbax").exists()


def test_a_conversion_without_memory_is_one_line(folder, tmp_path, capsys, monkeypatch):
    def raise_memory_error(*_):
        raise MemoryError

    monkeypatch.setattr(huggingface, "read_tensor", raise_memory_error)
    assert convert("hf_to_orbax", [str(folder), str(tmp_path / "orbax")]) == 2
    message = (
        "out of memory on the host: convert with --mesh, or on a machine with more memory: two of the largest tensors are in "
        "memory at once\n"
    )
    assert capsys.readouterr().err == f"convert.hf_to_orbax: error: {message}" and os.listdir(tmp_path) in ([], [folder.name])


def test_what_a_folder_wishes_of_sampling_is_told(folder, caplog):
    generation_config = dict(do_sample=True, temperature=0.6, top_p=None, eos_token_id=1)
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
    with caplog.at_level("INFO", "icejax"):
        load_model(folder)
    line = "generation_config.json has do_sample=True, temperature=0.6, which is ignored unless --sampling model asks for it"
    assert line in caplog.messages


def test_conversion_into_or_of_a_broken_source_makes_nothing(folder, tmp_path, capsys):
    before = sorted(folder.iterdir())
    assert convert("hf_to_orbax", [str(folder), str(folder / "orbax")]) == 2
    error = capsys.readouterr().err
    assert error == f"convert.hf_to_orbax: error: {folder}/orbax is in the source {folder}: choose another place\n"
    assert sorted(folder.iterdir()) == before
    (folder / "config.json").write_text("{")
    assert convert("hf_to_orbax", [str(folder), str(tmp_path / "new" / "deep")]) == 2 and not (tmp_path / "new").exists()


def test_a_link_that_leads_nowhere_is_told(folder):
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").symlink_to("gone")
    with pytest.raises(InputError, match="has no generation_config.json"):
        load_model(folder)


def test_converters_refuse_to_overwrite_unless_forced(folder, tmp_path, capsys):
    target = tmp_path / "orbax"
    target.mkdir()
    (target / "precious").touch()
    assert convert("hf_to_orbax", [str(folder), str(target), "--force"]) == 2
    assert "exists and is no checkpoint folder: choose another place" in capsys.readouterr().err
    (target / "config.json").touch()
    assert convert("hf_to_orbax", [str(folder), str(target)]) == 2
    error = capsys.readouterr().err
    assert error == f"convert.hf_to_orbax: error: {target} exists: choose another place, or give --force to replace it\n"
    assert convert("hf_to_orbax", [str(folder), str(target), "--force"]) == 2
    assert f"{target} holds more than a checkpoint (precious): choose another place" in capsys.readouterr().err
    (target / "precious").unlink()
    assert convert("hf_to_orbax", [str(folder), str(target), "--force"]) == 0
    assert (target / ORBAX).is_dir()
    assert convert("hf_to_orbax", [str(folder), str(folder), "--force"]) == 2
    assert f"{folder} is the source: choose another place" in capsys.readouterr().err


def test_a_folder_whose_writer_was_killed_is_not_converted_into_itself(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / ".model.old")  # between two renames
    model = str(tmp_path / "model")
    assert convert("hf_to_orbax", [model, model, "--force"]) == 2
    assert f"{model} is the source: choose another place" in capsys.readouterr().err
    assert (tmp_path / ".model.old" / "config.json").exists()


def test_a_name_that_is_no_unicode_is_refused_and_any_other_is_printed_in_one_line(folder, tmp_path, capsys):
    assert convert("hf_to_orbax", [str(folder), str(tmp_path / os.fsdecode(b"caf\xe9"))]) == 2
    assert "is no UTF-8 text, which libraries need that write there: choose another name\n" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [folder]
    assert convert("hf_to_orbax", [str(folder), str(tmp_path / "a\nb")]) == 0
    assert "a\\nb: an icejax" in capsys.readouterr().out


def test_a_conversion_brings_the_vocabulary_and_all_templates(folder, tmp_path):
    source = shutil.copytree(folder, tmp_path / "source")
    (source / "additional_chat_templates").mkdir()
    names = ("tekken.json", "vocab.txt", "additional_chat_templates/tool_use.jinja")
    for name in names:
        (source / name).write_text(name)
    for flags in ([], ["--force"]):
        assert convert("hf_to_orbax", [str(source), str(tmp_path / "orbax"), *flags]) == 0
        for name in names:
            assert (tmp_path / "orbax" / name).read_text() == name


def test_failed_conversion_leaves_only_the_old_folder(folder, tmp_path, capsys, monkeypatch):
    target = tmp_path / "orbax"
    assert convert("hf_to_orbax", [str(folder), str(target)]) == 0
    before = sorted(p.name for p in tmp_path.iterdir())

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(converters.orbax, "save", interrupt)
    for arguments in ([str(target), "--force"], [str(tmp_path / "new")]):
        with pytest.raises(KeyboardInterrupt):
            convert("hf_to_orbax", [str(folder), *arguments])
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    load_model(target)


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_unwritable_conversion_is_one_line_and_keeps_the_old(folder, tmp_path, capfd, monkeypatch, to):
    """The file-size limit makes Orbax and safetensors fail in their own code."""
    assert convert("hf_to_orbax", [str(folder), str(tmp_path / "orbax")]) == 0
    name, source = ("hf_to_orbax", folder) if to == "orbax" else ("orbax_to_hf", tmp_path / "orbax")
    assert convert(name, [str(source), str(tmp_path / "target")]) == 0
    before, unraisable = sorted(p.name for p in tmp_path.iterdir()), []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    capfd.readouterr()
    with file_limit(10_000):
        status = convert(name, [str(source), str(tmp_path / "target"), "--force"])
    expected = f"{tmp_path / 'target'} cannot be written (File too large): what was there before is kept"
    assert (status, capfd.readouterr().err) == (2, f"convert.{name}: error: {expected}\n") and not unraisable
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    load_model(tmp_path / "target")
    for reader, function in ((huggingface, "read_tensor"), (converters.orbax, "read")):
        monkeypatch.setattr(reader, function, lambda *_: pytest.fail("a tensor was read"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 2**40, 1000))
    assert convert(name, [str(source), str(tmp_path / "target"), "--force"]) == 2
    assert "GiB and 9.31e-07 GiB is free on its disk: make room" in capfd.readouterr().err
    with claim(tmp_path / "target", mark="config.json"):
        assert convert(name, [str(source), str(tmp_path / "target"), "--force"]) == 2
    assert "is in use by another writer of this process" in capfd.readouterr().err


def test_checkpoint_with_interrupted_replacement_still_loads(folder):
    folder.rename(folder.parent / ".hf.old")
    load_model(folder)


def test_converters_refuse_the_other_form_and_broken_ones(folder, tmp_path, capsys):
    assert convert("orbax_to_hf", [str(folder), str(tmp_path / "a")]) == 2
    assert "expected an icejax folder" in capsys.readouterr().err
    assert convert("hf_to_orbax", [str(folder), str(tmp_path / "orbax")]) == 0
    assert convert("hf_to_orbax", [str(tmp_path / "orbax"), str(tmp_path / "b")]) == 2
    assert "is an icejax folder already" in capsys.readouterr().err
    families.edit_config(tmp_path / "orbax", intermediate_size=100)
    with pytest.raises(InputError, match=r"up_proj.weight has shape \[96, 64\], expected \[100, 64\]"):
        load_model(tmp_path / "orbax")
    for file in (tmp_path / "orbax" / ORBAX).glob("_METADATA"):
        file.unlink()
    with pytest.raises(InputError, match="is not a whole Orbax checkpoint"):
        load_model(tmp_path / "orbax")
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()
