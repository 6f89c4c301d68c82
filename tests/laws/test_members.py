"""The members that are tried by default are a pairwise cover of all."""

from itertools import combinations

from laws.members import (
    CODECS,
    LAYOUTS,
    RECORDS,
    Axes,
    kind_of_codec,
    kind_of_record,
    pairwise,
    product,
)


def test_the_quick_members_have_every_pair_that_any_has():
    every, quick = product(), pairwise(product())
    for first, second in combinations(Axes._fields, 2):

        def pairs(members, first=first, second=second):
            kind = {
                "record": lambda axes: kind_of_record(axes.record),
                "layout": lambda axes: axes.layout.split(" of ")[0],
                "codec": lambda axes: kind_of_codec(axes.codec),
            }
            return {(kind[first](axes), kind[second](axes)) for axes in members}

        assert pairs(quick) == pairs(every)
    for name in Axes._fields:
        assert {getattr(axes, name) for axes in quick} == {getattr(axes, name) for axes in every}
    # Which keeps rope keys otherwise than those of heads.
    assert "fp8_ds_mla" in {axes.codec for axes in quick if RECORDS[axes.record].rope_key}
    assert len(quick) == len(set(quick)) <= 40


def test_the_product_is_whole():
    """MHA, GQA and MQA are in every layout of slots with every codec."""
    every = set(product())
    for record in ("mha", "gqa", "mqa"):
        for layout in LAYOUTS:
            for codec in CODECS:
                assert (Axes(record, layout, codec) in every) == (layout != "ring")
