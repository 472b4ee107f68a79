from __future__ import annotations

import pytest
import torch
from jaxtyping import TypeCheckError

from seqdiff.types import Cond, as_seeds


def cond(b: int = 3, k: int = 1, n: int = 4, m: int = 5, c: int = 6) -> Cond:
    return Cond(
        mask=torch.ones(b, k, n, dtype=torch.bool),
        pos=torch.randn(b, n, 3),
        group=torch.arange(n).expand(b, n),
        ctx=torch.randn(b, m, c),
        ctx_pos=torch.randn(b, m, 3),
        ctx_mask=torch.ones(b, m, dtype=torch.bool),
        tok=torch.randn(b, n, c),
    )


def test_dropping_the_context_leaves_the_latents_and_their_places():
    whole = cond()
    none = whole.drop()
    assert not none.ctx_mask.any() and (none.tok == 0).all()
    assert none.mask is whole.mask and none.pos is whole.pos
    assert whole.ctx_mask.all() and (whole.tok != 0).all()  # the condition itself is not changed


def test_dropping_some_items_leaves_the_others_bit_equal():
    whole = cond()
    some = whole.drop(torch.tensor([False, True, False]))
    assert some.ctx_mask.all(1).tolist() == [True, False, True]
    assert torch.equal(some.tok[[0, 2]], whole.tok[[0, 2]]) and (some.tok[1] == 0).all()


def test_shapes_are_checked_under_pytest():
    with pytest.raises(TypeCheckError):
        Cond(**{**cond().__dict__, "ctx_mask": torch.ones(3, 9, dtype=torch.bool)})
    with pytest.raises(TypeCheckError):
        Cond(**{**cond().__dict__, "mask": torch.ones(3, 1, 4)})


def test_seeds_depend_on_seed_item_and_sample_alone():
    whole = as_seeds(7, 6, 4)
    assert torch.equal(whole[2:4, :3], as_seeds(7, 2, 3, first_item=2))
    many = torch.cat([as_seeds(s, 50, 64).flatten() for s in (0, 1, 2**31 - 1)])
    assert len(many.unique()) == len(many)
    assert whole.dtype == torch.int64 and (many >= 0).all()


@pytest.mark.parametrize("bad", [-1, 2**31])
def test_seeds_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=r"expected an integer in \[0, 2\*\*31\)"):
        as_seeds(bad, 1, 1)
