"""The prefix store on the disk: a later engine answers behind a stored prefix as without it, and damage costs only time."""

import dataclasses
import errno
import json
import os
import re
import shutil
import stat
import time

import pytest

import icejax
from icejax.cache.registry import Clustered, Coded, Full, Packed, SnapKV
from icejax.checks.errors import InputError
from icejax.engine.sampling import Sampling
from icejax.engine.serving import core as core_module
from icejax.engine.serving import prefix_folder
from icejax.engine.serving.core import Core
from icejax.engine.serving.job import CoreSizes
from tests.engine.test_core import alone, answers, assert_all_free, assert_equal, job, slow
from tests.helpers import families
from tests.helpers.letters import Letters

PAGES = dict(budget=2048, page_size=8, compact_every=32)  # a budget for all tokens, even in partly filled pages
CACHES = {
    "full": Full(),
    "clustered": Clustered(**PAGES),
    "coded": Coded(**PAGES),
    "look": Clustered(**PAGES, look=4),
}
DOCUMENT = families.tokens(300)
PROMPTS = [[*DOCUMENT, *families.tokens(20 + 5 * i, seed=i)] for i in range(5)]
OTHER = [*families.tokens(300, seed=9), *families.tokens(20)]
ANSWER = dict(max_new_tokens=10, logprobs=0)


@pytest.fixture(autouse=True)
def steps_between_all_pieces(monkeypatch):
    monkeypatch.setattr(core_module, "UNIT_S", -60.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return families.load(families.build(families.row("qwen3-layer-types")), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model):
    """The answers to the prompts alone."""
    return [alone(model, Full(), prompt, **ANSWER) for prompt in PROMPTS]


def core_of(model, folder, policy=CACHES["full"], *, places: int = 1, longest: int = 500, disk: int = 2**30, **options) -> Core:
    sizes = dict(places=places, prompt_tokens=longest, new_tokens=40, prompts=(longest,) * places, joins=True)
    sizes |= dict(prefix_memory=2**24, prefix_disk=disk)
    return Core(model, Letters(), policy, CoreSizes(**sizes), prefix_dir=folder, **options)


def ask(core: Core, *prompts, salt: str = "") -> list[icejax.GenerationResponse]:
    """Answers prompts one after another."""
    replies = []
    for prompt in prompts:
        core.submit(dataclasses.replace(job(prompt, **ANSWER), salt=salt))
        replies.append(answers(core)[0])
    return replies


def files(folder) -> list:
    return sorted(path for path in folder.glob("*/*") if path.is_file())


@pytest.fixture(scope="module")
def stored(model, tmp_path_factory):
    """A folder with the common part of two prompts; only to be copied."""
    folder = tmp_path_factory.mktemp("prefixes")
    ask(core_of(model, folder), *PROMPTS[:2])
    assert [path.suffix for path in files(folder)] == [".arrays", ".json"]
    return folder


@pytest.fixture
def folder(stored, tmp_path):
    """A copy of `stored`."""
    (name,) = os.listdir(stored)
    (tmp_path / name).mkdir(mode=0o700)
    for path in files(stored):
        (tmp_path / name / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("name", "places"),
    [slow(*case) for case in (("full", 1), ("clustered", 2), ("clustered", 1), ("coded", 1), ("look", 1), ("full", 2))],
)
def test_a_later_engine_answers_behind_a_stored_prefix(model, expected, tmp_path, name, places):
    """The third prompt reads it from the disk between steps of another row, the fourth has it in memory."""
    for answer, alone_answer in zip(
        ask(core_of(model, tmp_path, CACHES[name], places=places), *PROMPTS[:2]), expected, strict=False
    ):
        assert_equal(answer, alone_answer)
    core = core_of(model, tmp_path, CACHES[name], places=places, share=0.5)
    if places > 1:
        core.submit(job(OTHER, 7, max_new_tokens=40, logprobs=0))
        while not core.scheduler.decoding:
            list(core.step())
    for i in (2, 3):
        core.submit(job(PROMPTS[i], i, **ANSWER))
    replies = answers(core)
    for i in (2, 3):
        assert_equal(replies[i], expected[i])
        assert replies[i].cached_tokens == 256
    assert core._prefix_cache.prefixes.hits == 512
    while core._prefix_cache.prefixes.evict():
        pass
    assert_all_free(core)


@pytest.mark.slow
def test_codes_without_pages_come_back_from_memory_and_disk(model, tmp_path):
    cache = Packed(budget=64, page_size=8, exact=0)
    core = core_of(model, tmp_path, cache)
    ask(core, *PROMPTS[:2])
    (kept,), (read,) = ask(core, PROMPTS[2]), ask(core_of(model, tmp_path, cache), PROMPTS[2])
    assert kept.cached_tokens == read.cached_tokens == 256
    assert_equal(read, kept)


def test_a_prompt_that_is_a_stored_prefix_needs_no_prefill(model, folder):
    (answer,) = ask(core_of(model, folder), DOCUMENT[:256])
    assert answer.cached_tokens == 256
    assert_equal(answer, alone(model, Full(), DOCUMENT[:256], **ANSWER))


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [DOCUMENT[:256], PROMPTS[2]], ids=["the prefix itself", "a text behind it"])
def test_a_sampled_answer_behind_a_stored_prefix_draws_the_same(model, folder, prompt):
    options = dict(max_new_tokens=12, sampling=Sampling(temperature=1.5), seed=3)
    core = core_of(model, folder)
    core.submit(job(prompt, **options))
    (answer,) = answers(core).values()
    assert answer.cached_tokens == 256
    assert answer.token_ids == alone(model, Full(), prompt, **options).token_ids
    core.submit(job(prompt, **options | dict(seed=4)))
    assert answers(core)[0].token_ids != answer.token_ids


def test_a_prompt_that_two_others_go_on_from_is_stored_whole(model, tmp_path):
    """A chat's next turn alone is no reason: it would store each turn again."""
    core = core_of(model, tmp_path)
    ask(core, DOCUMENT, PROMPTS[0])
    assert not files(tmp_path)
    ask(core, PROMPTS[1])
    (_, about) = files(tmp_path)
    assert json.loads(about.read_text())["length"] == 300
    other = [*DOCUMENT[:299], 1 - DOCUMENT[299] % 2, *families.tokens(20)]
    assert [ask(core_of(model, tmp_path), prompt)[0].cached_tokens for prompt in (PROMPTS[2], other)] == [300, 0]


def test_files_are_the_users_alone(model, folder, stored):
    (inner,) = stored.iterdir()
    assert stat.S_IMODE(inner.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in files(stored)} == {0o600}
    (inner,) = folder.iterdir()
    inner.chmod(0o750)
    with pytest.raises(InputError, match=f"others may read or write {inner}: remove it, or choose another prefix_dir"):
        core_of(model, folder)


@pytest.mark.parametrize(
    "others", [dict(salt="mine"), slow(dict(policy=Clustered(**PAGES))), dict(longest=600)], ids=lambda x: next(iter(x))
)
def test_another_salt_cache_or_context_shares_nothing(model, folder, others):
    salt = others.pop("salt", "")
    assert ask(core_of(model, folder, **others), PROMPTS[2], salt=salt)[0].cached_tokens == 0


def flip(path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def change(about, **changes) -> None:
    fields = json.loads(about.read_text()) | changes
    del fields["checksum"]
    about.write_text(json.dumps(fields | {"checksum": prefix_folder._checksum(fields)}))


DAMAGE = {
    "a byte of an array": (lambda arrays, about: flip(arrays, -1), "the bytes of .* are not those that were saved"),
    "an array too few": (lambda arrays, about: os.truncate(arrays, 100), "arrays has 100 bytes, expected"),
    "no arrays": (lambda arrays, about: arrays.unlink(), "No such file"),
    "a byte of the description": (lambda arrays, about: flip(about, -20), "its description is not as it was saved|is no JSON"),
    "no text": (lambda arrays, about: about.write_bytes(b"\xff"), "its description is no JSON"),
    "no description": (lambda arrays, about: about.write_text("{}"), "its description is not as it was saved"),
    "a pipe": (lambda arrays, about: (about.unlink(), os.mkfifo(about)), "its description is no file"),
    "a length without end": (
        lambda arrays, about: change(about, length=float("inf")),
        "its description says no tokens and pages",
    ),
    "no tokens": (lambda arrays, about: change(about, length=0), "0 tokens and [0-9]+ pages cannot be"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_prefix_is_computed_anew(model, expected, folder, caplog, case):
    damage, message = DAMAGE[case]
    arrays, about = files(folder)
    damage(arrays, about)
    (answer,) = ask(core_of(model, folder), PROMPTS[2])
    assert_equal(answer, expected[2])
    assert answer.cached_tokens == 0
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert str(folder) in warning and re.search(message, warning)
    assert not files(folder)


def test_an_array_of_another_kind_is_no_prefix(model, expected, folder, caplog):
    _, about = files(folder)
    arrays = json.loads(about.read_text())["arrays"]
    name = next(name for name in arrays if name.startswith("cache."))
    change(about, arrays=arrays | {name: arrays[name] | {"dtype": "int32"}})
    (answer,) = ask(core_of(model, folder), PROMPTS[2])
    assert_equal(answer, expected[2])
    assert f"{name} is int32" in caplog.text and answer.cached_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize("in_memory", [False, True])
def test_the_least_recently_used_goes_first(model, tmp_path, in_memory):
    """Room for two prefixes: the first one stored has been used since, so the second one goes."""
    first = core_of(model, tmp_path)
    ask(first, *PROMPTS[:2])
    size = sum(path.stat().st_size for path in files(tmp_path))
    disk = 2 * size + size // 2 + prefix_folder.ABOUT_BYTES
    documents = [families.tokens(300, seed=20 + i) for i in range(2)]
    for document, prompt in zip(documents, PROMPTS[2:], strict=False):
        ask(core_of(model, tmp_path, disk=disk), [*document, 1], [*document, 2])
        for path in files(tmp_path):
            os.utime(path, (path.stat().st_mtime - 100, path.stat().st_mtime - 100))
        assert ask(first if in_memory else core_of(model, tmp_path), prompt)[0].cached_tokens == 256
    held = [ask(core_of(model, tmp_path), [*document, 3])[0].cached_tokens for document in documents]
    assert held == [0, 256] and len(files(tmp_path)) == 4
    core_of(model, tmp_path, disk=size + 100)
    assert len(files(tmp_path)) == 2


def test_all_bytes_of_the_files_count(model, tmp_path, caplog):
    ask(core_of(model, tmp_path), *PROMPTS[:2])
    size = sum(path.stat().st_size for path in files(tmp_path))
    for disk, count in ((size - 1, 0), (size + prefix_folder.ABOUT_BYTES, 2)):
        core = core_of(model, tmp_path, disk=disk)
        assert not files(tmp_path)
        ask(core, *PROMPTS[:2])
        assert len(files(tmp_path)) == count
        core_of(model, tmp_path, disk=0)
    assert f"prefix_disk leaves {size - 1} bytes" in caplog.text


@pytest.mark.slow
def test_a_disk_that_is_nearly_full_gets_room_by_the_oldest_prefix(model, folder, monkeypatch, caplog):
    """Without a prefix to remove, nothing is written."""
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=prefix_folder.RESERVE))
    old = {path.name for path in files(folder)}
    document = families.tokens(300, seed=20)
    monkeypatch.setattr(prefix_folder, "ABOUT_BYTES", 0)
    ask(core_of(model, folder), [*document, 1], [*document, 2])
    assert len(files(folder)) == 2 and not old & {path.name for path in files(folder)}
    core = core_of(model, folder, disk=0)
    ask(core, *PROMPTS[:2])
    assert not files(folder) and "prefix_disk leaves 0 bytes" in caplog.text


@pytest.mark.slow
def test_a_full_disk_stops_no_answer(model, expected, tmp_path, caplog, monkeypatch):
    def full(self, name, array):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prefix_folder.ArrayWriter, "write", full)
    for answer, alone_answer in zip(ask(core_of(model, tmp_path), *PROMPTS[:4]), expected, strict=False):
        assert_equal(answer, alone_answer)
    assert not files(tmp_path) and caplog.text.count("cannot be stored") == caplog.text.count("No space left on device") == 1


def test_an_error_that_may_pass_removes_no_file(model, expected, folder, caplog, monkeypatch):
    def failing(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    core = core_of(model, folder)
    monkeypatch.setattr(prefix_folder.ArrayFile, "read", failing)
    (answer,) = ask(core, PROMPTS[2])
    assert_equal(answer, expected[2])
    assert answer.cached_tokens == 0 and len(files(folder)) == 2 and "Too many open files" in caplog.text


def test_what_another_engine_has_written_anew_is_not_removed(model, expected, folder, caplog):
    core = core_of(model, folder)
    _, about = files(folder)
    fields = json.loads(about.read_text())
    change(about, pages=fields["pages"] + 1)
    (answer,) = ask(core, PROMPTS[2])
    assert_equal(answer, expected[2])
    assert answer.cached_tokens == 0 and len(files(folder)) == 2 and "another engine has written it again" in caplog.text
    assert ask(core_of(model, folder), PROMPTS[2])[0].cached_tokens == 256


def test_a_prefix_that_another_engine_stored_is_not_written_again(model, tmp_path):
    first, second = core_of(model, tmp_path), core_of(model, tmp_path)
    ask(first, *PROMPTS[:2])
    before = [(path.name, path.stat().st_ino) for path in files(tmp_path)]
    assert ask(second, *PROMPTS[:2])[1].cached_tokens == 0
    assert [(path.name, path.stat().st_ino) for path in files(tmp_path)] == before


def test_a_folder_that_may_only_be_read_is_read(model, folder, monkeypatch):
    monkeypatch.setattr(os, "utime", lambda path: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only file system")))
    assert ask(core_of(model, folder), PROMPTS[2])[0].cached_tokens == 256


def test_weights_that_differ_in_one_value_share_nothing(tmp_path_factory, folder):
    model = families.load(families.build(families.row("qwen3-layer-types")), tmp_path_factory.mktemp("model"))
    embedding = model.model.embed_tokens
    embedding.weight[...] = embedding.weight[...].at[70, 3].add(1e-3)
    assert ask(core_of(model, folder), PROMPTS[2])[0].cached_tokens == 0


def test_a_cancelled_prompt_leaves_no_part_of_a_file(model, tmp_path):
    core = core_of(model, tmp_path)
    ask(core, PROMPTS[0])
    ticket = core.submit(job(PROMPTS[1], **ANSWER))
    while not files(tmp_path):
        list(core.step())
    (part,) = files(tmp_path)
    assert part.name.startswith(".part.")
    core.release(ticket)
    assert not files(tmp_path)
    core.submit(job(PROMPTS[2], **ANSWER))
    while not files(tmp_path):
        list(core.step())
    core.close()
    assert not files(tmp_path)


def test_what_killed_writers_left_is_removed_after_a_day(model, folder):
    arrays, about = files(folder)
    parts = [arrays.with_name(".part.1"), arrays.with_name("0" * 64 + ".arrays")]
    for part in parts:
        part.write_text("half")
    core_of(model, folder)
    assert {*files(folder)} == {arrays, about, *parts}
    for part in parts:
        os.utime(part, (time.time() - 90000,) * 2)
    core_of(model, folder)
    assert {*files(folder)} == {arrays, about}


def test_files_of_other_programs_are_never_removed(model, tmp_path):
    """Other programs have folders of 32 hex digits too, and where others may write a link may lead to the user's files."""
    root, own = tmp_path / "root", tmp_path / "own"
    for folder in (root / ("0" * 32), own):
        folder.mkdir(parents=True)
        for name in ("output.pkl", "0" * 64 + ".arrays", "thesis.json"):
            (folder / name).write_text("mine")
            os.utime(folder / name, (time.time() - 90000,) * 2)
    (root / ("1" * 32)).symlink_to(own)
    core_of(model, root, disk=1)
    assert sorted(file.name for file in (root / ("0" * 32)).iterdir()) == ["output.pkl", "thesis.json"]
    assert len([*own.iterdir()]) == 3


def test_a_link_in_place_of_the_models_folder_is_refused(model, folder):
    (place,) = folder.iterdir()
    place.rename(folder.parent / "elsewhere")
    place.symlink_to(folder.parent / "elsewhere")
    with pytest.raises(InputError, match=f"others may read or write {place}: remove it, or choose another prefix_dir"):
        core_of(model, folder)
    place.unlink()
    (folder.parent / "elsewhere").rename(place)


@pytest.mark.slow
def test_eviction_caches_store_nothing_on_the_disk(model, tmp_path):
    core = core_of(model, tmp_path, SnapKV(budget=2048))
    assert [answer.cached_tokens for answer in ask(core, *PROMPTS[:2], PROMPTS[1])] == [0, 0, len(PROMPTS[1])]
    assert not files(tmp_path)


def test_a_folder_that_cannot_be_is_refused(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"prefix_dir .*file cannot be used \(.*\): choose another folder"):
        core_of(model, tmp_path / "file")


def test_a_cache_without_a_name_is_refused(model, tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Mine(Full):
        pass

    with pytest.raises(InputError, match="a Mine cache cannot be saved: register it in icejax.POLICIES"):
        core_of(model, tmp_path, Mine())
