"""What `Accelerator.prepare` returns, in the engine and in a loop with `prefetch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import headrace as hr
from frameworks.training import (
    EAGER,
    assert_same,
    classifier,
    forget_accelerators,
    loss_of,
    needs,
    samples,
    seeded,
    shuffled,
    stopped_after,
    weights,
)
from headrace.device import Device
from headrace.errors import StepError
from headrace.fake import FakeDevice, fake_cuda

accelerate = needs("accelerate")
data_loaders = needs("accelerate.data_loader")

EPOCHS = 2


def parts(model: torch.nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)


def by_accelerate(
    make_loader: Callable[[], Any] = shuffled,
    wrap: Callable[[Any], Any] = lambda loader: loader,
    **settings: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Accelerate's own loop, as its guide has it. `wrap` is applied to the prepared loader."""
    accelerator = accelerate.Accelerator(cpu=True, **settings)
    model = classifier()
    optimizer, scheduler = parts(model)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, scheduler, make_loader()
    )
    seeded(5)
    losses, wrapped = [], wrap(loader)
    for _ in range(EPOCHS):
        for batch in wrapped:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses, weights(model)


def prepared_engine(plan: str = "pipeline", **settings: Any) -> tuple[hr.Engine, Any]:
    """An engine of prepared objects, and a prepared loader."""
    accelerator = accelerate.Accelerator(cpu=True, **settings)
    model = classifier()
    optimizer, scheduler = parts(model)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, scheduler, shuffled()
    )
    return hr.Engine(model, optimizer, loss_of, scheduler=scheduler, plan=plan), loader


class TestEverythingPrepared:
    @pytest.mark.parametrize("plan", EAGER)
    def test_the_same_as_its_own_loop(self, plan: str) -> None:
        losses, expected = by_accelerate()
        engine, loader = prepared_engine(plan)
        seeded(5)
        assert [one for _ in range(EPOCHS) for one in engine.epoch(loader).losses] == losses
        assert_same(weights(engine.model), expected)

    def test_the_same_as_plain_objects(self) -> None:
        model = classifier()
        optimizer, scheduler = parts(model)
        plain = hr.Engine(model, optimizer, loss_of, scheduler=scheduler)
        engine, _ = prepared_engine()
        data = [tuple(batch) for batch in DataLoader(samples(), 4)]
        seeded(5)
        expected = plain.epoch(data).losses
        seeded(5)
        assert engine.epoch(data).losses == expected
        assert_same(weights(engine.model), weights(plain.model))

    def test_its_bf16_autocast_stays(self) -> None:
        in_fp32, _ = by_accelerate()
        forget_accelerators()
        losses, expected = by_accelerate(mixed_precision="bf16")
        assert losses != in_fp32
        engine, loader = prepared_engine(mixed_precision="bf16")
        seeded(5)
        assert [one for _ in range(EPOCHS) for one in engine.epoch(loader).losses] == losses
        assert_same(weights(engine.model), expected)

    @pytest.mark.parametrize("plan", EAGER)
    @pytest.mark.parametrize("non_blocking", [False, True])
    def test_a_loader_that_moves_batches_to_the_device(self, plan: str, non_blocking: bool) -> None:
        losses, expected = by_accelerate()
        with FakeDevice() as device:
            loader = data_loaders.prepare_data_loader(
                shuffled(),
                device=device.torch_device,
                put_on_device=True,
                non_blocking=non_blocking,
            )
            model = classifier().to(device.torch_device)
            optimizer, scheduler = parts(model)
            engine = hr.Engine(
                model, optimizer, loss_of, scheduler=scheduler, plan=plan, device=device
            )
            seeded(5)
            assert [one for _ in range(EPOCHS) for one in engine.epoch(loader).losses] == losses
            assert_same(weights(model), expected)


class Noisy(Dataset[Any]):
    """Draws from PyTorch's generator for each sample."""

    def __init__(self) -> None:
        self._samples = samples()

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, at: int) -> Any:
        features, label = self._samples[at]
        return features + 0.1 * torch.randn(8), label


KINDS = ["plain", "noisy", "seedable", "prefetched", "workers"]


def stop_and_resume(device: Device, kind: str, epochs: int, batches: int) -> None:
    """In the midst of an epoch, and on in another process: with a fresh loader and model, and with
    generators that stand anywhere."""
    configuration = accelerate.DataLoaderConfiguration(
        use_seedable_sampler=kind == "seedable",
    )
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=configuration)

    def made() -> tuple[hr.Engine, Any]:
        model = classifier().to(device.torch_device)
        optimizer, scheduler = parts(model)
        data = Noisy() if kind in ("noisy", "prefetched") else samples()
        workers = 1 if kind == "workers" else 0
        loader = accelerator.prepare(DataLoader(data, 4, shuffle=True, num_workers=workers))
        if kind == "prefetched":
            loader = hr.prefetch(loader, device)
        engine = hr.Engine(model, optimizer, loss_of, scheduler=scheduler, device=device)
        seeded(5)
        return engine, loader

    whole, loader = made()
    expected = [one for _ in range(3) for one in whole.epoch(loader).losses]
    engine, loader = made()
    for _ in range(epochs):
        engine.epoch(loader)
    state = stopped_after(engine, loader, batches)
    assert state["loader"] is None
    again, loader = made()
    seeded(99)
    again.load_state_dict(state)
    rest = [one for _ in range(3 - epochs) for one in again.epoch(loader).losses]
    assert rest == expected[-len(rest) :]
    assert_same(weights(again.model), weights(whole.model))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
class TestPreparedLoaders:
    def test_prefetch(self, place: Device) -> None:
        loader = accelerate.Accelerator(cpu=True).prepare(DataLoader(samples(), 4))
        expected = [features for features, _ in DataLoader(samples(), 4)]
        for _ in range(2):
            found = [features.cpu() for features, _ in hr.prefetch(loader, place)]
            assert all(map(torch.equal, found, expected))
            assert len(found) == len(expected)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("epochs", "batches"), [(0, 1), (1, 7)])
    def test_stopped_and_resumed(self, kind: str, epochs: int, batches: int) -> None:
        stop_and_resume(hr.open_device("cpu"), kind, epochs, batches)

    def test_stopped_and_resumed_on_a_device(self) -> None:
        with FakeDevice() as device:
            stop_and_resume(device, "noisy", 1, 4)

    def test_the_flag_of_the_last_batch_stays_right(self) -> None:
        """Accelerate accumulates four batches and, as the flag says, the last two alone."""
        losses, expected = by_accelerate(gradient_accumulation_steps=4)
        found, prefetched = by_accelerate(
            wrap=lambda loader: hr.prefetch(loader, "cpu"), gradient_accumulation_steps=4
        )
        assert found == losses
        assert_same(prefetched, expected)


class TestWhatIsRefused:
    def test_another_gradient_accumulation(self) -> None:
        with pytest.raises(StepError, match=r"gradient_accumulation_steps=4, .* accumulate=1"):
            prepared_engine(gradient_accumulation_steps=4)

    def test_the_same_gradient_accumulation_is_the_engines(self) -> None:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
        found = []
        for is_prepared in (False, True):
            model = classifier()
            given = (model, *parts(model))
            model, optimizer, scheduler = accelerator.prepare(*given) if is_prepared else given
            engine = hr.Engine(model, optimizer, loss_of, scheduler=scheduler, accumulate=4)
            seeded(5)
            found.append((engine.epoch(shuffled()).losses, engine.updates, weights(model)))
        assert found[0][:2] == found[1][:2]
        assert found[0][1] == 3  # 4 + 4 + 2 batches
        assert_same(found[0][2], found[1][2])

    def test_its_own_scaler(self) -> None:
        accelerate.Accelerator(cpu=True)
        model = classifier()
        wrapper = accelerate.optimizer.AcceleratedOptimizer
        optimizer = wrapper(parts(model)[0], scaler=torch.amp.GradScaler("cpu"))
        with pytest.raises(StepError, match=r"mixed_precision='fp16'.*Engine\(precision='fp16'\)"):
            hr.Engine(model, optimizer, loss_of)

    def test_a_backend_that_updates_by_itself(self) -> None:
        deepspeed = needs("accelerate.utils.deepspeed")
        accelerate.Accelerator(cpu=True)
        model = classifier()
        optimizer = deepspeed.DeepSpeedOptimizerWrapper(parts(model)[0])
        with pytest.raises(StepError, match="DeepSpeedOptimizerWrapper, whose backend"):
            hr.Engine(model, optimizer, loss_of)

    def test_a_scheduler_that_is_stepped_once_a_process(self) -> None:
        accelerator = accelerate.Accelerator(cpu=True)
        model = classifier()
        optimizer, scheduler = accelerator.prepare(*parts(model))
        accelerate.state.AcceleratorState().__dict__["num_processes"] = 2
        with pytest.raises(StepError, match="which steps it 2 times after each update"):
            hr.Engine(model, optimizer, loss_of, scheduler=scheduler)
        hr.Engine(model, optimizer, loss_of, scheduler=scheduler.scheduler)

    def test_a_scheduler_of_another_optimizer(self) -> None:
        accelerator = accelerate.Accelerator(cpu=True)
        model = classifier()
        _, scheduler = accelerator.prepare(*parts(model))
        other, _ = accelerator.prepare(*parts(model))
        with pytest.raises(StepError, match="belongs to another optimizer"):
            hr.Engine(model, other, loss_of, scheduler=scheduler)

    def test_a_scheduler_made_for_the_prepared_optimizer_is_taken(self) -> None:
        model = classifier()
        optimizer = accelerate.Accelerator(cpu=True).prepare(torch.optim.SGD(model.parameters()))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        hr.Engine(model, optimizer, loss_of, scheduler=scheduler).epoch(shuffled())
        assert optimizer.param_groups[0]["lr"] == 0.001 * 0.5**2


def sped_up_loop(when: str | None, **settings: Any) -> tuple[Any, ...]:
    """Accelerate's loop on a GPU, with `hr.speed_up` before or after `prepare`, or without it."""
    with fake_cuda() as device:
        accelerator = accelerate.Accelerator(**settings)
        model = classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)
        handle = hr.speed_up(model, optimizer) if when == "before" else None
        pinned = DataLoader(samples(36), 4, shuffle=True, pin_memory=True)
        model, optimizer, scheduler, loader = accelerator.prepare(
            model, optimizer, scheduler, pinned
        )
        if when == "after":
            handle = hr.speed_up(model, optimizer, loader=loader)
            assert handle.loader is loader
        waits: list[int] = []
        seeded(5)
        losses, skipped = [], []
        for _ in range(EPOCHS):
            for batch in loader:
                waits.append(len(device.hidden_waits))
                with accelerator.accumulate(model):
                    loss = loss_of(model, batch)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                losses.append(accelerator.gather(loss).mean().detach())
                skipped.append(accelerator.optimizer_step_was_skipped)
        if when == "after" and settings.get("mixed_precision") != "fp16":
            assert waits[-1] == waits[4]  # the loader's copies wait no more
        losses = [one.item() for one in losses]
        report = None if handle is None else handle.report()
        saved = accelerator.get_state_dict(model)
        found = losses, skipped, {name: one.cpu() for name, one in saved.items()}, report
        if handle is not None:
            handle.close()
        seeded(6)
        loss_of(model, batch).backward()
        optimizer.step()  # its own again
        assert handle is None or handle.report().parts[1].replays == report.parts[1].replays
    forget_accelerators()
    return found


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "settings",
    [
        {"mixed_precision": "bf16", "gradient_accumulation_steps": 2},
        {"mixed_precision": "fp16"},
        {},
    ],
)
def test_speed_up_before_or_after_prepare(when: str, settings: Any) -> None:
    losses, skipped, expected, _ = sped_up_loop(None, **settings)
    found, also_skipped, given, report = sped_up_loop(when, **settings)
    assert found == losses
    assert also_skipped == skipped
    assert_same(given, expected)
    assert [part.name for part in report.parts] == ["Sequential", "AdamW"]
    assert [part.captures for part in report.parts] == [1, 1], str(report)
    assert all(part.replays > 3 for part in report.parts)


def test_speed_up_of_what_stays_on_the_cpu() -> None:
    """Where there is a GPU, a model on the CPU may be moved later. If it is not, it stays eager."""
    with fake_cuda():
        model = classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with hr.speed_up(model, optimizer) as handle:
            for batch in shuffled():
                loss_of(model, batch).backward()
                optimizer.step()
            model_part, update = handle.report().parts
        assert "some of its parameters or buffers are not on cuda:0" in str(model_part.why)
        assert update.replays == 0
