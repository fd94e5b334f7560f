"""What the drawings show: every id of a small batch, counts of what a big one hides, well-formed HTML."""

import re
from xml.etree import ElementTree

import torch
from hypothesis import given
from torch.utils import _pytree as pytree

from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from tests.sparse.jagged_batches import Batch, batches


def parse(html: str | None) -> ElementTree.Element:
    style, body = html.split("</style>")
    assert style.startswith("<style>")
    return ElementTree.fromstring(body)


def boxes(element: ElementTree.Element) -> list[str]:
    return [box.text or "" for box in element.iter("span") if box.get("class") == "rsl-id"]


def test_text_shows_every_id_and_weight_of_a_small_batch() -> None:
    weights = torch.tensor([0.5, 1, 2, 0.25])
    kjt = KeyedJaggedTensor(["a", "bb"], torch.arange(4), weights, torch.tensor([2, 0, 1, 1]))
    assert repr(kjt) == (
        "KeyedJaggedTensor(2 features x 2 samples, 4 ids, int64, weighted)\n"
        "  a   [0:0.5 1:1] []\n"
        "  bb  [2:2]       [3:0.25]"
    )
    assert repr(kjt["a"]) == "JaggedTensor(2 samples, 2 ids, int64, weighted)\n  [0:0.5 1:1] []"


@given(batches())
def test_html_has_a_band_a_feature_and_a_row_a_sample(batch: Batch) -> None:
    html = batch.kjt()._repr_html_()
    if not any(batch.rows):
        assert html is None
        return
    root = parse(html)
    bands = root.findall("./table/tbody")
    assert len(bands) == len(batch.keys)
    for key, band, bags in zip(batch.keys, bands, batch.rows, strict=True):
        rows = band.findall("tr")
        assert rows[0][0].text == key
        assert len(rows) == max(1, len(bags))
        assert bool(bags) == ("no bags" not in "".join(band.itertext()))
        for row, bag in zip(rows, bags, strict=bool(bags)):
            shown = [box.strip() for box in boxes(row)]
            assert shown == [str(id_) for id_ in bag[: len(shown)]]
            text = "".join(row.itertext())
            assert ("empty" in text) == (not bag)
            assert len(bag) == len(shown) or f"+{len(bag) - len(shown)}" in text


def big() -> KeyedJaggedTensor:
    lengths = torch.full((30 * 1000,), 20)
    return KeyedJaggedTensor([f"feature_{f}" for f in range(30)], torch.arange(600_000), lengths=lengths)


def test_a_big_batch_is_cut_with_counts() -> None:
    text, html = repr(big()), big()._repr_html_()
    assert len(text) < 3_000
    assert len(html) < 20_000
    assert "30 features x 1,000 samples, 600,000 ids" in text
    assert re.search(r"showing 20 of 30 features and \d of 1,000 samples", text)
    assert "+16]" in text
    assert "Showing 8 of 30 features and 3 of 1,000 samples." in html
    assert html.count("997 more samples") == 8


def test_names_cannot_smuggle_in_markup() -> None:
    kjt = KeyedJaggedTensor(["<b>&"], torch.arange(1), lengths=torch.tensor([1]))
    assert parse(kjt._repr_html_()).findall(".//tbody/tr/th")[0].text == "<b>&"
    kt = KeyedTensor(["<i>"], [1], torch.ones(1, 1))
    assert parse(kt._repr_html_()).findall(".//th")[1].text == "<i>"


def test_what_has_no_numbers_to_read_still_prints() -> None:
    kjt = KeyedJaggedTensor(["a"], torch.arange(2), lengths=torch.tensor([2]))
    assert repr(kjt.to("meta")) == "KeyedJaggedTensor(['a'], values=int64, meta[2], without numbers to show)"
    assert kjt.to("meta")._repr_html_() is None
    assert "without numbers" in repr(pytree.tree_map(lambda leaf: leaf.shape, kjt))
    assert "KeyedTensor(" in repr(KeyedTensor(["a"], [1], torch.ones(1, 1)).to("meta"))
    assert repr(JaggedTensor.empty()) == "JaggedTensor(0 samples, 0 ids, float32)"
    assert (
        str(JaggedTensor(torch.tensor([3, 4]), lengths=torch.tensor([2, 0])))
        == "JaggedTensor({\n    [[3, 4], []]\n})\n"
    )


def test_str_has_every_value() -> None:
    kjt = KeyedJaggedTensor(["a", "b"], torch.arange(40), lengths=torch.tensor([30, 0, 4, 6]))
    found = eval(str(kjt).removeprefix("KeyedJaggedTensor(").rstrip(")\n"))
    assert found == {key: [bag.tolist() for bag in part.to_dense()] for key, part in kjt.to_dict().items()}
    kt = KeyedTensor(["a", "b"], [1, 30], torch.arange(62.0).view(2, 31))
    assert eval(str(kt).removeprefix("KeyedTensor(").rstrip(")\n")) == {k: t.tolist() for k, t in kt.to_dict().items()}
    for without_numbers in (kjt.to("meta"), kt.to("meta"), kjt["a"].to("meta")):
        assert str(without_numbers) == repr(without_numbers)
