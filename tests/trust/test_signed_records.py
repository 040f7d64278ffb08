"""Signed records: every edit, gap or forgery is refused."""

import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedntk.trust import SealError, verify_records
from fedntk.trust.signed_records import append_record, load_signing_key

from ..conftest import refused

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
PUBLIC = KEY.public_key().public_bytes_raw().hex()
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(31) + b"1")


def content(number, deleted=1):
    return {"round": number, "deleted": deleted, "before": str(number - 1), "after": str(number)}


@pytest.fixture
def path(tmp_path):
    for number in (1, 2, 3):
        append_record(tmp_path / "records.jsonl", content(number), KEY)
    return tmp_path / "records.jsonl"


def change(path, edit):
    lines = path.read_text().splitlines()
    path.write_text("\n".join(edit(lines)))


def test_records_are_what_was_signed_in_their_order(path):
    records = verify_records(path, PUBLIC)
    assert [(r["round"], r["deleted"]) for r in records] == [(1, 1), (2, 1), (3, 1)]
    assert verify_records(path) == records


def test_a_round_that_is_run_again_replaces_its_record_and_later_ones(path):
    append_record(path, content(2, deleted=5), KEY)
    assert [(r["round"], r["deleted"]) for r in verify_records(path)] == [(1, 1), (2, 5)]


def test_a_record_whose_round_was_never_saved_is_left_behind(path):
    """The run went on from the round before, in which the next round changes nothing."""
    append_record(path, {**content(5), "before": "2"}, KEY)
    assert [r["round"] for r in verify_records(path)] == [1, 2, 5]
    append_record(path, {**content(6), "before": "0"}, KEY)
    assert [r["round"] for r in verify_records(path)] == [6]


def edited(name, value):
    def edit(lines):
        return [lines[0], json.dumps({**json.loads(lines[1]), name: value}), lines[2]]

    return edit


EDITS = {
    "a number": edited("deleted", 2),
    "the model": edited("after", "9"),
    "a new entry": edited("more", 1),
    "a key": edited("key", OTHER.public_key().public_bytes_raw().hex()),
    "no key": edited("key", ""),
    "a signature": edited("signature", "00" * 64),
    "no signature": edited("signature", None),
    "an entry twice": lambda lines: [*lines[:2], lines[2].replace("{", '{"deleted": 9, ', 1)],
    "spaces": lambda lines: [*lines[:2], lines[2].replace(": ", ":")],
    "a gap": lambda lines: [lines[0], lines[2]],
    "no first": lambda lines: lines[1:],
    "another order": lambda lines: [lines[1], lines[0], lines[2]],
    "twice": lambda lines: [*lines, lines[2]],
    "no JSON": lambda lines: [*lines, "x"],
    "a list": lambda lines: [*lines, "[1]"],
    "empty": lambda _: [],
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_file_is_refused(name, path):
    change(path, EDITS[name])
    refused(r"records\.jsonl", verify_records, path, error=SealError)
    refused(r"records\.jsonl", verify_records, path, PUBLIC, error=SealError)


def test_a_forged_chain_is_refused_by_who_knows_the_key(path, tmp_path):
    """Without the key it is a chain like any other."""
    for number in (1, 2):
        append_record(tmp_path / "forged.jsonl", content(number), OTHER)
    assert len(verify_records(tmp_path / "forged.jsonl")) == 2
    said = f"line 1: signed by .*, expected {PUBLIC}"
    refused(said, verify_records, tmp_path / "forged.jsonl", PUBLIC, error=SealError)
    append_record(path, content(4), OTHER)
    refused("line 4: signed by", verify_records, path, error=SealError)


@pytest.mark.parametrize("other", [{"before": "9"}, {"run": "other"}])
def test_a_record_leads_on_from_the_model_of_the_one_before(other, path):
    """In the same run; a model that no record led to loses none."""
    append_record(path, content(4) | other, KEY)
    refused("line 4: it does not follow", verify_records, path, error=SealError)


def test_the_key_is_drawn_once_and_only_its_owner_reads_it(tmp_path):
    path = tmp_path / "folder" / "key"
    first, second = load_signing_key(path), load_signing_key(path)
    assert first.private_bytes_raw() == second.private_bytes_raw()
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]
    path.write_text("no key")
    refused("expected a signing key", load_signing_key, path, error=SealError)
