"""Steps and exchanges of one replica without others."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import daskdl
from daskdl.data.checks import trainable
from daskdl.planning import measure as scene_module
from daskdl.planning.measure import Scene, Script

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 3


class TestScene:
    def scene(self, lr=0.1, **options):
        script = Script(
            nn.Linear(6, 3),
            nn.functional.cross_entropy,
            lambda params: torch.optim.SGD(params, lr=lr),
            (X.numpy(), Y.numpy()),
            daskdl.GradientSharing(**options),
            1,
        )
        return Scene(script, torch.device("cpu"))

    @pytest.mark.parametrize("apply", ["eager", "strict"])
    def test_a_threshold_settles_inside_its_band(self, apply):
        rule = daskdl.AdaptiveThreshold(initial=1e-9, min_density=0.2, max_density=0.5)
        scene = self.scene(threshold=rule, apply=apply)
        scene.step()

        scene.settle()

        densities = [scene.step().density for _ in range(20)]
        assert scene._compressor.sent["*"].threshold > 1e-5
        assert 0.1 < sum(densities) / len(densities) < 0.6

    @pytest.mark.parametrize("apply", ["eager", "strict"])
    def test_where_steps_take_too_long_settling_makes_two_and_harms_no_parameter(
        self, apply, monkeypatch
    ):
        now = [0.0]
        clock = SimpleNamespace(perf_counter=lambda: now[0])
        monkeypatch.setattr(scene_module, "time", clock)
        rule = daskdl.AdaptiveThreshold(initial=1e-7)
        scene = self.scene(lr=1e-4, threshold=rule, apply=apply)
        backward, made = scene._stepper.backward, []

        def slow(group):
            made.append(group)
            now[0] += 1.01 * scene_module.SETTLING_S
            return backward(group)

        scene.step()
        before = [p.detach().clone() for p in trainable(scene._stepper._module)]
        scene._stepper.backward = slow

        scene.settle()

        after = trainable(scene._stepper._module)
        moved = max(
            float((a.detach() - b).abs().max())
            for a, b in zip(after, before, strict=True)
        )
        sent = scene._compressor.sent["*"]
        assert len(made) == 2
        assert sent.threshold > 10 * rule.initial  # others have followed the two
        assert moved < 3 * 1e-4  # what one step moves, gradients being below 1
        assert abs(scene._vector.residual_counts()).max() > 0

    def test_with_an_interval_there_is_an_exchange_after_so_many_steps(self):
        scene = self.scene(exchange_every=3)
        counted = []
        step = scene._stepper.update
        scene._stepper.update = lambda scale: counted.append(scale) or step(scale)

        scene.step()
        scene.step()

        assert len(counted) == 6
        assert scene._exchanges == 2

    @pytest.mark.parametrize(
        ("apply", "expected"), [("eager", (2.0, 1.0)), ("strict", (1.0, 0.5))]
    )
    def test_the_scale_is_that_of_one_of_two(self, apply, expected):
        scene = self.scene(update_scale="mean", apply=apply)
        scales = []
        scene._stepper.update = scales.append

        scene.step()

        assert (scene._vector.lead, *scales) == expected

    def test_an_update_is_taken_in_before_the_next_step(self):
        scene = self.scene(lr=1.0, threshold=daskdl.FixedThreshold(2.0**-10))
        scene.step()
        taken = []
        apply = scene._vector.apply_
        scene._vector.apply_ = lambda update: taken.append(update) or apply(update)

        times = scene.step()

        assert [update.stamp.sequence for update in taken] == [1]
        assert times.update_bytes == sum(frame.nbytes for frame in scene.frames) > 64

    def test_training_goes_on_meanwhile(self):
        scene = self.scene()
        before = [p.detach().clone() for p in trainable(scene._stepper._module)]

        scene.step()

        after = trainable(scene._stepper._module)
        assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
