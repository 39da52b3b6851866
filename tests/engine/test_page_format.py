"""A page as bytes: what goes in comes out, and nothing else is ever taken for a page."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.engine.pagefile import (
    FORMS,
    HEADER,
    MAGIC,
    PART,
    PageLayout,
    PagePart,
    StoredPage,
    decode_page,
    encode_page,
)
from dspark.errors import DamagedPageError, ForeignPageError, PageError, StalePageError

WHO, TEXT = bytes(range(16)), bytes(range(16, 32))


@st.composite
def pages(draw) -> tuple[PageLayout, StoredPage]:
    size = draw(st.integers(1, 20))
    form = st.sampled_from(sorted(FORMS))
    parts = [
        PagePart(kind, draw(form), i, size, draw(st.integers(1, 3)), draw(st.integers(1, 9)))
        for i, kind in enumerate(draw(st.lists(st.sampled_from(["target", "draft"]), min_size=1,
                                               max_size=4)))
    ]  # fmt: skip
    if draw(st.booleans()):
        parts.append(PagePart("matrix", "float32", 0, 1, 2, 9))
    layout = PageLayout(size, tuple(parts))
    maps = [tuple(draw(st.lists(st.booleans(), min_size=size, max_size=size))) for _ in range(2)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    scale = draw(st.sampled_from([1e-6, 1.0, 1e4]))
    tensors = tuple(
        torch.randn(p.rows, p.heads, p.width, generator=generator).mul(scale)
        .to(torch.bfloat16 if p.form == "bfloat16" else torch.float32)
        for p in parts
    )  # fmt: skip
    return layout, StoredPage(*maps, tensors)


@settings(deadline=None, max_examples=80)
@given(pages())
def test_what_goes_in_comes_out(made) -> None:
    layout, page = made
    data = encode_page(layout, WHO, TEXT, page)
    assert len(data) == layout.byte_count
    assert len(data) % 8 == 0
    back = decode_page(layout, WHO, TEXT, data)
    assert (back.target_rows, back.draft_rows) == (page.target_rows, page.draft_rows)
    for part, found, tensor in zip(layout.parts, back.tensors, page.tensors, strict=True):
        valid = {"target": page.target_rows, "draft": page.draft_rows}.get(part.kind, (True,))
        for row, sound in enumerate(valid):
            if not sound:
                assert not found[row].any()
            elif part.form == "fp8":
                step = tensor[row].abs().amax(-1, keepdim=True) / 448
                assert ((found[row] - tensor[row]).abs() <= 16.1 * step).all()
            else:
                assert torch.equal(found[row], tensor[row])
    # fp8 numbers are on the grid now: storing them again changes no code (a scale its last bit)
    again = encode_page(layout, WHO, TEXT, back)
    if all(part.form != "fp8" for part in layout.parts):
        assert again == data
    for one, other in zip(decode_page(layout, WHO, TEXT, again).tensors, back.tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=3e-7, atol=0)


@settings(deadline=None, max_examples=60)
@given(pages(), st.data())
def test_every_cut_and_every_changed_bit_is_noticed(made, data) -> None:
    layout, page = made
    whole = encode_page(layout, WHO, TEXT, page)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(PageError):
        decode_page(layout, WHO, TEXT, whole[:cut])
    with pytest.raises(PageError):
        decode_page(layout, WHO, TEXT, whole + b"\0")
    at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    changed = bytearray(whole)
    changed[at] ^= 1 << bit
    with pytest.raises(PageError):
        decode_page(layout, WHO, TEXT, bytes(changed))


@settings(deadline=None, max_examples=40)
@given(st.binary(max_size=300))
def test_other_bytes_are_refused_whatever_they_are(noise: bytes) -> None:
    layout = PageLayout(4, (PagePart("target", "float32", 0, 4, 1, 2),))
    with pytest.raises(PageError):
        decode_page(layout, WHO, TEXT, noise)
    with pytest.raises(PageError):
        decode_page(layout, WHO, TEXT, MAGIC + noise)


def made_page() -> tuple[PageLayout, StoredPage, bytes]:
    layout = PageLayout(
        4, (PagePart("target", "float32", 0, 4, 1, 3), PagePart("draft", "fp8", 0, 4, 1, 3))
    )
    rows = torch.arange(12.0).view(4, 1, 3)
    page = StoredPage((True,) * 4, (True, True, False, True), (rows, rows))
    return layout, page, encode_page(layout, WHO, TEXT, page)


def test_each_reason_has_its_own_error() -> None:
    layout, _, data = made_page()
    for cut in (0, 79, 80, len(data) - 1):
        with pytest.raises(DamagedPageError):
            decode_page(layout, WHO, TEXT, data[:cut])
    with pytest.raises(DamagedPageError, match="checksum"):
        decode_page(layout, WHO, TEXT, data[:-9] + b"\1" + data[-8:])
    with pytest.raises(ForeignPageError, match="DSPKPAGE"):
        decode_page(layout, WHO, TEXT, b"SAFETENS" + data[8:])
    with pytest.raises(ForeignPageError, match="version 2"):
        decode_page(layout, WHO, TEXT, data[:8] + b"\2\0" + data[10:])
    for other in (
        PageLayout(8, layout.parts),
        PageLayout(4, layout.parts[:1]),
        PageLayout(4, (layout.parts[0], layout.parts[1]._replace(form="bfloat16"))),
        PageLayout(4, (layout.parts[0]._replace(width=6), layout.parts[1])),
    ):
        with pytest.raises(ForeignPageError):
            decode_page(other, WHO, TEXT, data)
    with pytest.raises(StalePageError, match="weights"):
        decode_page(layout, TEXT, TEXT, data)
    with pytest.raises(StalePageError, match="text"):
        decode_page(layout, WHO, WHO, data)


def test_numbers_that_are_not_finite_are_never_stored_unless_nobody_reads_them() -> None:
    layout, page, _ = made_page()
    rows = page.tensors[1].clone()
    rows[2] = float("nan")  # the row that is not sound
    again = StoredPage(page.target_rows, page.draft_rows, (page.tensors[0], rows))
    found = decode_page(layout, WHO, TEXT, encode_page(layout, WHO, TEXT, again))
    assert not found.tensors[1][2].any()
    rows[1] = float("inf")
    with pytest.raises(PageError, match="draft layer 0"):
        encode_page(layout, WHO, TEXT, again)


def test_the_bytes_are_those_of_the_specification() -> None:
    """Written out by hand from docs/formats.md."""
    import hashlib

    layout, _, data = made_page()
    head = struct.pack("<8sHHIIIQ", b"DSPKPAGE", 1, 0, 4, 2, 0, len(data) - 80)
    table = struct.pack("<BBHIII", 0, 0, 0, 4, 1, 3) + struct.pack("<BBHIII", 1, 2, 0, 4, 1, 3)
    maps = bytes([0b1111, 0b1011])
    front = table + maps + bytes(6)
    target = struct.pack("<12f", *range(12))
    scales = [2 / 448, 5 / 448, 1.0, 11 / 448]
    rows = [[0, 1, 2], [3, 4, 5], [0, 0, 0], [9, 10, 11]]
    codes = b""
    for scale, row in zip(scales, rows, strict=True):
        wide = torch.tensor(row, dtype=torch.float32) / torch.tensor(scale, dtype=torch.float32)
        codes += wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy().tobytes()
    draft = struct.pack("<4f", *scales) + codes
    after = front + target + draft + bytes(4)
    blank = head + WHO + TEXT + bytes(16)
    checksum = hashlib.blake2b(blank + after, digest_size=16).digest()
    assert data == head + WHO + TEXT + checksum + after
    assert (HEADER.size, PART.size, layout.head_bytes) == (80, 16, 120)


def test_the_draft_adds_rows_and_nothing_else() -> None:
    """Kimi-K3, fp8 rows: 24 target layers and 5 draft layers of 576 under one header."""

    def part(kind, layer):
        return PagePart(kind, "fp8", layer, 64, 1, 576)

    target = tuple(part("target", i) for i in range(24))
    both = PageLayout(64, (*target, *(part("draft", i) for i in range(5))))
    alone = PageLayout(64, target)
    assert both.byte_count - alone.byte_count == 5 * 64 * (576 + 4) + 5 * PART.size
    assert both.bytes_per_token() == pytest.approx(29 * 580, rel=1e-3)
    hidden_states = 5 * 7168 * 2  # what shipping the tapped states in bf16 would take
    assert hidden_states / ((both.byte_count - alone.byte_count) / 64) == pytest.approx(
        24.7, abs=0.1
    )
