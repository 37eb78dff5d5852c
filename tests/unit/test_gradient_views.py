"""Memory of gradients: what holds one, and devices without DLPack. Trainings: features/test_user_gradients.py."""

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from ddp_compile.runtime.buckets.gradient_views import GradientViews


def places_in(flat: Tensor) -> list[Tensor]:
    return [
        flat[0:12].view(3, 4),
        flat[12:18].view(1, 6),
        flat[18:18],
        flat[18:19].view(()),
        flat[20:28].as_strided((2, 2, 2), (1, 4, 2)),
        flat[28:37].view(1, 1, 3, 3).as_strided((1, 1, 3, 3), (9, 9, 3, 1)),
    ]


@pytest.mark.parametrize(
    "take",
    [lambda view: view, Tensor.t, Tensor.detach, Tensor.numpy, Tensor.untyped_storage],
    ids=["itself", "view", "detached", "array", "storage"],
)
def test_holders(take: object) -> None:
    assert callable(take)
    views = GradientViews(places_in(torch.zeros(40)))
    held = take(views.tensors[1])
    nothing: list[Tensor | None] = [None] * len(views.tensors)
    assert not views.are_free() and not views.make_free(nothing)
    del held
    assert views.are_free()


def test_gradient_with_other_memory() -> None:
    flat = torch.zeros(40)
    views = GradientViews(places_in(flat))
    parameter = Parameter(torch.zeros(3, 4))
    parameter.grad = views.tensors[0]
    parameter.grad.data = torch.ones(3, 4)
    assert views.make_free([parameter.grad, *[None] * 5])
    assert views.tensors[0] is not parameter.grad and views.tensors[0].data_ptr() == flat.data_ptr()
    assert views.are_free()


def test_resized_buffer() -> None:
    flat = torch.arange(40.0)
    places = places_in(flat)
    views = GradientViews(places)
    kept = views.tensors[0]
    while flat.data_ptr() == kept.data_ptr():
        flat.untyped_storage().resize_(2 * flat.untyped_storage().nbytes())
    views.follow()
    assert kept is views.tensors[0] and torch.equal(kept, torch.arange(12.0).view(3, 4))
    del kept
    assert views.are_free()


def test_without_dlpack(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensor: Tensor) -> object:
        raise BufferError(f"Cannot pack tensors on {tensor.device}")

    monkeypatch.setattr(torch.utils.dlpack, "to_dlpack", refuse)
    flat = torch.zeros(40)
    places = places_in(flat)
    views = GradientViews(places)
    for i, (view, place) in enumerate(zip(views.tensors, places, strict=True)):
        view.fill_(i + 1)
        assert torch.equal(view, place) and view.shape == place.shape and view.stride() == place.stride()
    assert views.make_free(list(views.tensors))  # what stays .grad may be written
    assert not views.make_free([None] * len(places))  # otherwise the next iteration takes another buffer
