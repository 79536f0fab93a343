"""One optimizer step: its gradients, its loss, and what comes between them."""

import copy
import math
import re

import pytest
import torch
from torch import nn

from daskdl.errors import ModelError, OptionError
from daskdl.objective import OwnStep, Penalised
from daskdl.training.optimizer_step import Stepper, Stepping, scaled

CPU = torch.device("cpu")


def batches(*sizes):
    """Batches of so many rows, all different."""
    draw = torch.Generator().manual_seed(0)
    return [
        (torch.randn(n, 3, generator=draw), torch.randn(n, 2, generator=draw))
        for n in sizes
    ]


def linear():
    module = nn.Linear(3, 2)
    torch.nn.init.constant_(module.weight, 0.25)
    torch.nn.init.constant_(module.bias, -0.5)
    return module


def stepper(module, objective=None, lr=0.5, **options):
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    objective = objective or nn.MSELoss()
    return Stepper(module, objective, optimizer, Stepping(**options), CPU)


def gradients(module):
    return torch.cat([p.grad.reshape(-1) for p in module.parameters()])


class Held(nn.Linear, Penalised):
    """Its weights are to be small."""

    def penalty(self):
        return self.weight.square().sum()


class Free(Held):
    def penalty(self):
        return None


def gradient_of_step(kind, objective, *sizes):
    module = kind(3, 2)
    torch.nn.init.constant_(module.weight, 0.25)
    torch.nn.init.constant_(module.bias, -0.5)
    value = stepper(module, objective).backward(batches(*sizes))
    return value, module.weight.grad


class TestPenalty:
    @pytest.mark.parametrize("sizes", [(4,), (4, 4), (5, 2)], ids=str)
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_it_counts_once_in_a_step(self, sizes, reduction):
        loss = nn.MSELoss(reduction=reduction)

        value, gradient = gradient_of_step(Held, loss, *sizes)

        without, expected = gradient_of_step(Free, loss, *sizes)
        assert value == pytest.approx(without + 6 * 0.25**2, rel=1e-6)
        torch.testing.assert_close(gradient, expected + 2 * 0.25)

    def test_a_step_of_the_users_own_is_left_to_itself(self):
        own = OwnStep(lambda model, batch: model(batch[0]).square().mean())

        value, gradient = gradient_of_step(Held, own, 4)

        without, expected = gradient_of_step(Free, own, 4)
        assert value == without
        assert torch.equal(gradient, expected)


class TestAccumulation:
    @pytest.mark.parametrize("sizes", [(4, 4, 4), (5, 5, 2), (1, 7)], ids=str)
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_a_group_is_one_large_batch(self, sizes, reduction):
        group, loss = batches(*sizes), nn.MSELoss(reduction=reduction)
        whole = tuple(torch.cat(parts) for parts in zip(*group, strict=True))
        one, many = linear(), linear()

        expected = stepper(one, loss).backward([whole])
        value = stepper(many, loss).backward(group)

        assert value == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(gradients(many), gradients(one))

    @pytest.mark.parametrize("count", [3, 5, 7, 11])
    def test_equal_batches_are_divided_by_their_number(self, count):
        group = batches(*[4] * count)
        plain, own = linear(), linear()

        expected = 0.0
        for x, y in group:
            loss = nn.functional.mse_loss(plain(x), y) / count
            loss.backward()
            expected += loss.item()
        value = stepper(own).backward(group)

        assert torch.equal(gradients(own), gradients(plain))
        assert value == expected

    def test_gradients_of_the_step_before_are_gone(self):
        module = linear()
        own = stepper(module)

        own.backward(batches(4))
        own.backward(batches(4))
        twice = gradients(module)
        stepper(module).backward(batches(4))

        assert torch.equal(twice, gradients(module))

    def test_nothing_moves_before_the_update(self):
        module = linear()

        stepper(module).backward(batches(4, 4))

        assert torch.equal(module.weight, linear().weight)

    def test_one_bad_batch_shows_in_the_loss(self):
        group = batches(4, 4)
        group[0][0][0, 0] = math.nan

        assert math.isnan(stepper(linear()).backward(group))


class TestUpdate:
    def test_the_rate_is_scaled_for_this_step_only(self):
        module = linear()
        own = stepper(module, lr=0.5)
        own.backward(batches(4))
        expected = module.weight - 0.125 * module.weight.grad

        own.update(0.25)

        torch.testing.assert_close(module.weight, expected)
        assert own._optimizer.param_groups[0]["lr"] == 0.5

    def test_the_norm_of_the_sum_is_clipped_and_not_of_each_batch(self):
        group, module = batches(4, 4), linear()
        own = stepper(module, clip_grad_norm=0.01, lr=1.0)
        own.backward(group)
        assert gradients(module).norm() > 0.01  # or nothing would be clipped

        own.update(1.0)

        moved = torch.cat([(module.weight - 0.25).reshape(-1), module.bias + 0.5])
        assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)

    def test_a_group_without_a_rate_is_named(self):
        optimizer = torch.optim.SGD(linear().parameters(), lr=0.1)
        del optimizer.param_groups[0]["lr"]

        with (
            pytest.raises(ModelError, match=r"groups \[0\] .* no 'lr' to scale by 0.5"),
            scaled(optimizer, 0.5),
        ):
            pass


class TestAutocast:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_the_forward_pass_is_in_the_dtype_and_the_parameters_are_not(self, dtype):
        seen, module = [], linear()

        def step(model, batch):
            output = model(batch[0])
            seen.append((output.dtype, torch.is_autocast_enabled("cpu")))
            return output.float().square().mean()

        own = stepper(module, OwnStep(step), autocast=dtype)
        own.backward(batches(4))
        own.update(1.0)

        assert seen == [(dtype, True)]
        assert module.weight.dtype == module.weight.grad.dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")

    def test_the_backward_pass_is_outside(self):
        inside = []

        class Noting(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                inside.append(torch.is_autocast_enabled("cpu"))
                return gradient

        own = OwnStep(lambda model, batch: Noting.apply(model(batch[0])).float().mean())
        stepper(linear(), own, autocast=torch.bfloat16).backward(batches(4))

        assert inside == [False]

    @pytest.mark.parametrize("norm", [None, 1.0], ids=["", "clipped"])
    def test_gradients_that_overflow_in_float16_are_no_divergence(self, norm):
        module = linear()
        loss = OwnStep(lambda model, batch: 1e3 * model(batch[0]).square().mean())
        own = stepper(
            module, loss, lr=1e-6, autocast=torch.float16, clip_grad_norm=norm
        )

        moved, losses = [], []
        for _ in range(20):
            before = module.weight.clone()
            losses.append(own.backward(batches(4)))
            own.update(1.0)
            moved.append(not torch.equal(module.weight, before))

        assert all(math.isfinite(loss) for loss in losses)
        assert module.weight.isfinite().all()
        assert not moved[0]  # or nothing overflowed
        assert moved[-1]

    def test_the_loss_that_is_reported_is_not_scaled(self):
        value = stepper(linear(), autocast=torch.float16).backward(batches(4))

        expected = stepper(linear()).backward(batches(4))
        assert value == pytest.approx(expected, rel=1e-2)


def test_rows_come_in_the_dtypes_that_the_model_and_the_loss_expect():
    seen = []

    def step(model, batch):
        seen.append([part.dtype for part in batch])
        return model(batch[0]).mean()

    batch = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, dtype=torch.int32)
    stepper(linear(), OwnStep(step)).backward([batch])

    assert seen == [[torch.float32, torch.int64]]


def test_a_loss_with_weights_goes_where_the_model_is():
    loss = nn.CrossEntropyLoss(weight=torch.ones(2))
    meta = torch.device("meta")
    module = copy.deepcopy(linear()).to(meta)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    Stepper(module, loss, optimizer, Stepping(), meta)

    assert loss.weight.device == meta


class TestOptions:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"autocast": torch.bfloat16},
            {"autocast": torch.float16},
            {"accumulate": 64},
            {"clip_grad_norm": 1},
            {"clip_grad_norm": 0.5},
        ],
        ids=str,
    )
    def test_what_is_allowed_is_kept(self, options):
        made = Stepping(**options)

        assert {name: getattr(made, name) for name in options} == options

    @pytest.mark.parametrize(
        ("option", "value", "message"),
        [
            ("autocast", torch.float64, "torch.float16 or None, got torch.float64"),
            ("autocast", "bfloat16", "autocast must be torch.bfloat16, torch.float16 "
             "or None, got 'bfloat16'"),
            ("autocast", True, "or None, got True"),
            ("accumulate", 0, "accumulate must be a whole number >= 1, got 0"),
            ("accumulate", 2.0, "accumulate must be a whole number >= 1, got 2.0"),
            ("accumulate", None, "accumulate must be a whole number >= 1, got None"),
            ("clip_grad_norm", 0, "clip_grad_norm must be a number > 0 or None, got 0"),
            ("clip_grad_norm", -1.0, "must be a number > 0 or None, got -1.0"),
            ("clip_grad_norm", math.inf, "must be a number > 0 or None, got inf"),
            ("clip_grad_norm", math.nan, "must be a number > 0 or None, got nan"),
            ("clip_grad_norm", True, "must be a number > 0 or None, got True"),
            ("clip_grad_norm", "1", "must be a number > 0 or None, got '1'"),
        ],
        ids=repr,
    )  # fmt: skip
    def test_what_is_not_is_refused_by_name(self, option, value, message):
        with pytest.raises(OptionError, match=re.escape(message)):
            Stepping(**{option: value})

    def test_a_model_in_float16_has_no_gradients_to_scale(self):
        with pytest.raises(OptionError, match=r"autocast=torch.float16 .* 'weight'"):
            Stepping(torch.float16).check_model(linear().half())

    @pytest.mark.parametrize("dtype", [None, torch.bfloat16])
    def test_other_models_may_be_in_float16(self, dtype):
        assert Stepping(dtype).check_model(linear().half()) is None


class TestGradientNorm:
    @pytest.mark.parametrize("clip", [None, 1e-3])
    def test_it_is_that_of_all_gradients_before_they_are_clipped(self, clip):
        module = linear()
        own = stepper(module, clip_grad_norm=clip)
        own.backward(batches(4, 4))

        assert own.gradient_norm() == pytest.approx(float(gradients(module).norm()))

    def test_it_is_without_the_factor_of_float16(self):
        plain, scaled_up = stepper(linear()), stepper(linear(), autocast=torch.float16)
        plain.backward(batches(4))
        while scaled_up.backward(batches(4)) and scaled_up.gradient_norm() == math.inf:
            scaled_up.update(1.0)  # moves nothing, but the factor

        norm = plain.gradient_norm()
        assert scaled_up.gradient_norm() == pytest.approx(norm, rel=0.01)

    def test_a_parameter_without_a_gradient_counts_for_nothing(self):
        own = stepper(linear())

        assert own.gradient_norm() == 0.0
