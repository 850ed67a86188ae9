"""The sha256 of a model's weights: what changes it, what does not, and the ledger of one hash per step."""

from __future__ import annotations

import hashlib
import json
import struct

import pytest
import torch
from torch import nn

from rlt_train.weights.fingerprint import (
    Divergence,
    WeightLedger,
    combine_digests,
    fingerprint,
    first_divergence,
    read_ledger,
    tensor_digests,
)


class Small(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, reverse: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        values = {name: torch.randn(4, 3, generator=generator).to(dtype) for name in ("a", "b", "c")}
        for name in reversed(values) if reverse else values:
            self.register_parameter(name, nn.Parameter(values[name]))
        self.register_buffer("kept", torch.arange(3, dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def test_the_digest_is_sha256_of_dtype_shape_and_raw_bytes() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor([[1.0, -2.5]]))
    expected = hashlib.sha256(b"torch.float32 [1, 2]\n" + struct.pack("<2f", 1.0, -2.5)).hexdigest()
    assert tensor_digests(model) == {"weight": expected}
    assert fingerprint(model) == hashlib.sha256(json.dumps([["weight", expected]]).encode()).hexdigest()


def test_the_order_of_registration_does_not_matter_and_the_number_of_workers_neither() -> None:
    assert list(Small()._parameters) != list(Small(reverse=True)._parameters)
    assert fingerprint(Small(), workers=1) == fingerprint(Small(reverse=True), workers=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_bit_changes_the_hash_and_names_the_tensor(dtype: torch.dtype) -> None:
    model = Small(dtype)
    before = tensor_digests(model)
    with torch.no_grad():
        model.b[2, 1] = torch.nextafter(model.b[2, 1], torch.tensor(9.0, dtype=dtype))
    after = tensor_digests(model)
    assert [name for name in before if before[name] != after[name]] == ["b"]
    assert combine_digests(before) != combine_digests(after) == fingerprint(model)


def test_minus_zero_is_not_zero() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    before = fingerprint(model)
    with torch.no_grad():
        model.weight.copy_(-model.weight)
    assert torch.equal(model.weight, torch.zeros(1, 1)) and fingerprint(model) != before


@pytest.mark.parametrize("changed", ["dtype", "shape", "name"])
def test_the_same_bytes_under_another_dtype_shape_or_name_differ(changed: str) -> None:
    a, b = nn.Module(), nn.Module()
    zeros = torch.zeros(2, 3, dtype=torch.int32)
    other = {"dtype": zeros.view(torch.float32), "shape": zeros.reshape(3, 2), "name": zeros}[changed]
    a.register_buffer("x", zeros)
    b.register_buffer("y" if changed == "name" else "x", other)
    assert fingerprint(a) != fingerprint(b)


def test_two_tensors_that_swap_their_contents_are_seen() -> None:
    model, swapped = Small(), Small()
    swapped.a, swapped.b = swapped.b, swapped.a
    assert fingerprint(model) != fingerprint(swapped)


def test_persistent_buffers_count_and_caches_do_not() -> None:
    model = Small()
    before = fingerprint(model)
    model.cache.fill_(7.0)
    assert fingerprint(model) == before and "cache" not in tensor_digests(model)
    model.kept[1] = 9
    assert fingerprint(model) != before


def test_a_tied_tensor_counts_under_every_name_as_in_state_dict() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    model["again"] = model["head"]
    digests = tensor_digests(model)
    assert list(digests) == sorted(model.state_dict()) == ["again.weight", "embed.weight", "head.weight"]
    assert len(set(digests.values())) == 1


def test_layout_in_memory_does_not_matter() -> None:
    plain, strided = nn.Module(), nn.Module()
    values = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    plain.w = nn.Parameter(values.clone())
    strided.w = nn.Parameter(values.t().contiguous().t())
    assert not strided.w.is_contiguous() and fingerprint(plain) == fingerprint(strided)


def test_contiguous_tensors_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Small(torch.bfloat16)
    pointers = {tensor.data_ptr() for tensor in model.state_dict().values()}
    seen = []
    plain_sha256 = hashlib.sha256

    class Spy:
        def __init__(self, header: bytes = b"") -> None:
            self.digest = plain_sha256(header)

        def update(self, content: object) -> None:
            seen.append(content.__array_interface__["data"][0])
            self.digest.update(content)

        def hexdigest(self) -> str:
            return self.digest.hexdigest()

    monkeypatch.setattr("rlt_train.weights.fingerprint.hashlib.sha256", Spy)
    tensor_digests(model)
    assert set(seen) == pointers


def test_odd_tensors_scalar_empty_bool_complex_and_float8() -> None:
    model = nn.Module()
    model.register_buffer("scalar", torch.tensor(2.0))
    model.register_buffer("empty", torch.zeros(0, 3))
    model.register_buffer("flags", torch.tensor([True, False]))
    model.register_buffer("complex", torch.tensor([1 + 2j]).conj())
    model.register_buffer("float8", torch.ones(3).to(torch.float8_e4m3fn))
    assert len(set(tensor_digests(model).values())) == 5
    model.complex = torch.tensor([1 - 2j])
    conjugated = tensor_digests(model)["complex"]
    model.complex = torch.tensor([1 + 2j]).conj()
    assert tensor_digests(model)["complex"] == conjugated


def test_a_tensor_without_data_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'weight' is on the meta device"):
        fingerprint(nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="workers is 0"):
        fingerprint(nn.Linear(2, 2), workers=0)


def test_the_ledger_has_one_line_per_step_readable_while_it_is_open(tmp_path) -> None:
    model, path = Small(), tmp_path / "made" / "ledger.jsonl"
    with WeightLedger(path) as ledger:
        first = ledger.record(1, model)
        assert read_ledger(path) == {1: first} == {1: fingerprint(model)}
        with torch.no_grad():
            model.a.add_(1.0)
        second = ledger.record(2, model)
    assert path.read_text() == "".join(
        f'{{"step": {step}, "sha256": "{sha}"}}\n' for step, sha in [(1, first), (2, second)]
    )
    assert first != second


def test_a_killed_writer_costs_at_most_its_last_line(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"step": 1, "sha256": "aa"}\n{"step": 2, "sha2')
    assert read_ledger(path) == {1: "aa"}
    with WeightLedger(path) as ledger:
        ledger.write(2, "bb")
        ledger.write(3, "cc")
    with WeightLedger(path) as ledger:
        ledger.write(3, "dd")
    assert read_ledger(path) == {1: "aa", 2: "bb", 3: "dd"}


@pytest.mark.parametrize("line", ["not json", '{"step": 1}', "[]", '{"step": null, "sha256": "x"}'])
def test_a_broken_line_is_named(tmp_path, line: str) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(f'{{"step": 1, "sha256": "aa"}}\n{line}\n')
    with pytest.raises(ValueError, match=r"ledger\.jsonl, line 2: .* is not a ledger line"):
        read_ledger(path)


def test_first_divergence_finds_a_different_hash_and_a_missing_step() -> None:
    a = {1: "aa", 2: "bb", 3: "cc"}
    assert first_divergence(a, dict(a)) is None
    assert first_divergence(a, a | {3: "xx", 2: "yy"}) == Divergence(2, "bb", "yy")
    assert first_divergence(a, {1: "aa", 2: "bb"}) == Divergence(3, "cc", None)
    assert first_divergence({2: "bb"}, a) == Divergence(1, None, "aa")
    with pytest.raises(ValueError, match="nothing to compare"):
        first_divergence({}, {})
