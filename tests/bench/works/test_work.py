"""Works: the same each time, and one clear line about what is wrong with one."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.bench import find_work
from headrace.bench.endless_batches import EndlessBatches
from headrace.bench.works.builtin import BUILT_IN
from headrace.bench.works.training import ModelTraining, StepTraining
from headrace.bench.works.work import Workload, work_of
from headrace.data import batch_leaves, measure_leaves
from headrace.device import Device, open_device
from headrace.engine import Carry, Engine
from headrace.errors import BenchError, HeadraceError
from headrace.plan import LoaderPlan

SMALL: dict[str, dict[str, Any]] = {
    "translation": {"preset": "tiny", "batch": 3, "length": 7, "vocabulary": 50, "batches": 4},
    "resnet": {"depth": 14, "size": 32, "batch": 2, "width": 8, "classes": 10, "batches": 3},
    "mlp": {"batch": 4, "width": 8, "layers": 2, "batches": 4},
}


def small(name: str, **options: Any) -> Workload:
    return find_work(name, SMALL[name] | options)


def numbers(training: ModelTraining) -> list[torch.Tensor]:
    tensors = [*training.model.state_dict().values()]
    return tensors + [part for batch in training.loader for part in batch]


class TestBuiltIn:
    @pytest.mark.parametrize("name", list(BUILT_IN))
    def test_the_same_from_the_same_seed(self, name: str) -> None:
        cpu = open_device("cpu")
        one, two, other = (numbers(small(name).make(cpu, seed=seed)) for seed in (1, 1, 2))
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    @pytest.mark.parametrize("name", list(BUILT_IN))
    def test_every_plan_gives_the_same_losses(self, name: str, device: Device) -> None:
        found = []
        for plan in ("baseline", "pipeline", "graph"):
            model, optimizer, loss, loader, _ = small(name).make(device, pin=plan != "baseline")
            engine = Engine(model, optimizer, loss, plan=plan, device=device, deterministic=True)
            found.append(engine.epoch(EndlessBatches(loader).take(6)).losses)
        assert len(found[0]) == 6
        assert found[0] == found[1] == found[2]

    @pytest.mark.parametrize("name", list(BUILT_IN))
    def test_batches_are_the_same_from_workers(self, name: str) -> None:
        cpu = open_device("cpu")
        work = small(name)
        assert work.loader_fields == {"workers", "prefetch_factor", "batch_size"}
        plain = numbers(work.make(cpu))
        loaded = work.make(cpu, loader=LoaderPlan(workers=1, prefetch_factor=1))
        assert all(torch.equal(a, b) for a, b in zip(plain, numbers(loaded), strict=True))
        assert EndlessBatches(loaded.loader).ahead == 1

    def test_a_loader_plan_sets_the_batch_size(self) -> None:
        made = small("mlp").make(open_device("cpu"), loader=LoaderPlan(batch_size=9))
        assert measure_leaves(batch_leaves(next(iter(made.loader)))) == (9 * 8 * 4 + 9 * 8, 9)

    def test_translation_counts_target_tokens(self) -> None:
        cpu = open_device("cpu")
        work = small("translation")
        model, optimizer, loss, loader, _ = work.make(cpu)
        assert work.unit == "tokens"
        result = Engine(model, optimizer, loss, device=cpu).epoch(loader, max_steps=2)
        assert result.weights == (21.0, 21.0)

    def test_base_is_the_documents_model(self) -> None:
        model = find_work("translation").make(open_device("cpu")).model
        settings: Any = model.settings
        assert (settings.width, settings.heads, settings.inner) == (512, 8, 2048)
        assert (settings.encoder_layers, settings.decoder_layers, settings.dropout) == (6, 6, 0.1)

    def test_resnet50_has_its_parameters(self) -> None:
        from headrace.bench.works.resnet import ResNet

        count = sum(p.numel() for p in ResNet((3, 4, 6, 3)).parameters())
        assert count == 25_557_032  # as torchvision's

    @pytest.mark.parametrize("name", list(BUILT_IN))
    def test_small_ones_for_a_cpu(self, name: str) -> None:
        small, whole = find_work(name, small=True), find_work(name)
        assert dict(small.options) == {**whole.options, **BUILT_IN[name].small}
        assert find_work(name, {"batch": 17}, small=True).options["batch"] == 17

    @pytest.mark.parametrize(
        ("name", "options", "told"),
        [
            ("transaltion", {}, "no workload 'transaltion' (did you mean 'translation'?)"),
            ("mlp", {"widht": 3}, "mlp: no option 'widht' (did you mean 'width'?)"),
            ("mlp", {"width": 0}, "mlp: width = 0: expected a whole number, 1 or more"),
            ("mlp", {"dropout": 1}, "mlp: dropout = 1: expected a number from 0, below 1"),
            ("translation", {"preset": 3}, "translation: preset = 3: expected a name"),
            ("resnet", {"depth": 18}, "resnet: depth = 18: expected 14, 50, 101"),
            ("translation", {"preset": "huge"}, "no model 'huge'"),
        ],
    )
    def test_wrong_options_are_named(self, name: str, options: Any, told: str) -> None:
        with pytest.raises(HeadraceError, match=re.escape(told)):
            find_work(name, options).make(open_device("cpu"))


GOOD = """
import torch

def make_work(rows=4, batch_size=None):
    '''A line of my own. And more.'''
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def loss(model, batch):
        return model(batch).mean()
    return model, optimizer, loss, [torch.randn(batch_size or rows, 3) for _ in range(2)]
"""


STEP = """import torch, headrace as hr
def make_work():
    def step(batch):
        return batch.mean()
    return step, [torch.ones(1)]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


_names = itertools.count()


def written(folder: Path, text: str) -> str:
    """A module of its own name, since Python keeps what it has imported."""
    name = f"users_work_{next(_names)}"
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return name


class TestUsersWork:
    @pytest.mark.parametrize("ending", ["", ".py"])
    def test_a_module_or_a_file(self, here: Path, ending: str) -> None:
        name = written(here, GOOD)
        work = find_work(f"{name}{ending}:make_work", {"rows": 6})
        assert work.description == "A line of my own. And more"
        assert work.options == {"rows": 6, "batch_size": None}
        assert work.loader_fields == {"batch_size"}
        made = work.make(open_device("cpu"))
        again = work.make(open_device("cpu"), loader=LoaderPlan(batch_size=2))
        assert [batch.shape for batch in made.loader] == [(6, 3), (6, 3)]
        assert [batch.shape for batch in again.loader] == [(2, 3), (2, 3)]
        assert torch.equal(made.model.weight, again.model.weight)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("text", "line", "told"),
        [
            ("import nothing_of_that_name\n", 1, "cannot be imported: ModuleNotFoundError"),
            ("def make_work(:\n", 1, "cannot be imported"),
            ("def other():\n    pass\n", None, "has no 'make_work'"),
            ("make_work = 3\n", None, "make_work is a int: expected a function"),
            ("def make_work():\n    return 1,\n", 1, "returned a tuple of 1 (int)"),
            ("def make_work():\n    return 1, [2]\n", 1, "returned a int as step: expected a"),
            ("def make_work():\n    return print, 2\n", 1, "returned a int as loader: expected"),
            (STEP.replace("batch", "model, batch"), 2, "that does not take (batch)"),
            (STEP.replace("(1)]", "(1)], 0"), 2, "that does not take (batch, carried)"),
            (STEP.replace("step, [", "torch.nn.Linear(1, 1), ["), 2, "returned a Linear as step"),
            (STEP.replace("step, [", "hr.graphed(step), ["), 2, "step that hr.graphed has wrapped"),
            (GOOD.replace("return model,", "return {'step': 1},"), 4, "returned a dict as model"),
            (GOOD.replace("range(2)]", "range(2)], 0"), 4, "a carry, but its loss does not take"),
            (GOOD.replace("loss(model, batch)", "loss(m, batch, h)"), 4, "arguments and no carry"),
            ("def make_work():\n    pass\n", 1, "returned None: expected (model,"),
            ("def make_work():\n    return {'model': 1}\n", 1, "returned a dict: expected (model,"),
            ("def make_work():\n    return 1, 2, 3, 4\n", 1, "returned a int as model: expected a"),
            ("def make_work():\n    raise KeyError('x')\n", 2, "raised KeyError: 'x'"),
            ("def make_work(a):\n    pass\n", 1, "needs a value for a: expected --set a=…"),
            (
                GOOD.replace("[torch.randn", "(torch.randn").replace("range(2)]", "range(2))"),
                4,
                "returned a generator as loader, which can be iterated over only once",
            ),
            (
                GOOD.replace("SGD(model", "SGD(torch.nn.Linear(3, 1)"),
                4,
                "an optimizer without any of the model's parameters",
            ),
        ],
    )
    def test_what_is_wrong_is_one_line_with_its_place(
        self, here: Path, text: str, line: int | None, told: str
    ) -> None:
        name = written(here, text)
        with pytest.raises(BenchError) as caught:
            find_work(f"{name}:make_work").make(open_device("cpu"))
        message = str(caught.value)
        assert told in message
        assert "\n" not in message
        if line is not None:
            assert message.startswith(f"{here / name}.py:{line}:")

    def test_a_step_or_a_carry(self) -> None:
        def make(parts: dict[str, Any]) -> Any:
            return work_of(lambda: tuple(parts.values())).make(open_device("cpu"))

        model, loader = torch.nn.Linear(3, 1), [torch.ones(2, 3)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss(model: Any, batch: Any, carried: Any) -> Any:
            return model(batch).mean(), carried

        parts = {"model": model, "optimizer": optimizer, "loss": loss, "loader": loader}
        carried = make(parts | {"carry": {"h": torch.zeros(2)}})
        assert isinstance(carried, ModelTraining)
        assert torch.equal(carried.carry["h"], torch.zeros(2))
        step = make({"step": lambda batch: model(batch).mean(), "loader": loader})
        assert isinstance(step, StepTraining)
        assert list(step.state(open_device("cpu")).weights()) == [
            "Linear 1, weight",
            "Linear 1, bias",
        ]
        both = make({"step": lambda batch, h: (None, h), "loader": loader, "carry": Carry(loader)})
        assert isinstance(both, StepTraining)
        assert torch.equal(both.carry.initial[0], loader[0])

    def test_a_file_imports_from_its_own_folder(self, here: Path) -> None:
        (here / "inner").mkdir()
        sibling = written(here / "inner", "ROWS = 5\n")
        name = written(here / "inner", f"from {sibling} import ROWS\n" + GOOD)
        assert find_work(f"inner/{name}.py:make_work").options["rows"] == 4

    def test_a_module_that_is_not_there(self, here: Path) -> None:
        with pytest.raises(BenchError, match="no module 'nowhere' in"):
            find_work("nowhere:make_work")
        with pytest.raises(BenchError, match=r"nowhere\.py: no such file"):
            find_work("nowhere.py:make_work")
        with pytest.raises(BenchError, match="expected your_module:make_work"):
            find_work(":make_work")

    def test_it_is_given_what_it_names(self) -> None:
        given: dict[str, Any] = {}

        def make(device: Any, seed: int, pin: bool, workers: int = 3, **rest: Any) -> Any:
            given.update(device=device, seed=seed, pin=pin, workers=workers, **rest)
            model = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return ModelTraining(model, optimizer, lambda m, b: m(b).sum(), [torch.ones(1, 1)])

        work_of(make, {"other": 5}).make(open_device("cpu"), seed=7, pin=True)
        assert given == {
            "device": torch.device("cpu"),
            "seed": 7,
            "pin": False,
            "workers": 3,
            "other": 5,
        }


class TestFeed:
    def test_goes_on_where_it_was_and_begins_again(self) -> None:
        feed = EndlessBatches([1, 2, 3])
        assert list(feed.take(2)) == [1, 2]
        assert list(feed.take(4)) == [3, 1, 2, 3]

    def test_asks_for_no_more_than_it_gives(self) -> None:
        asked = []

        class Loader:
            def __iter__(self) -> Any:
                for number in range(9):
                    asked.append(number)
                    yield number

        assert list(EndlessBatches(Loader()).take(3)) == [0, 1, 2]
        assert asked == [0, 1, 2]

    def test_tells_the_sampler_its_epoch(self) -> None:
        class Sampler:
            epochs: list[int] = []  # noqa: RUF012

            def set_epoch(self, epoch: int) -> None:
                self.epochs.append(epoch)

        class Loader(list[int]):
            sampler = Sampler()

        list(EndlessBatches(Loader([1, 2])).take(5))
        assert Sampler.epochs == [0, 1, 2]

    def test_an_empty_loader_is_an_error(self) -> None:
        with pytest.raises(BenchError, match="mine: the loader has no batches"):
            list(EndlessBatches([], "mine").take(1))

    def test_closed_it_ends_the_loaders_processes(self) -> None:
        """At once: left to a garbage collection, they would hear of it late."""
        made = small("mlp").make(
            open_device("cpu"), seed=0, loader=LoaderPlan(workers=2), pin=False
        )
        feed = EndlessBatches(made.loader)
        assert len(list(feed.take(3))) == 3
        workers = made.loader._iterator._workers  # type: ignore[attr-defined]
        assert all(worker.is_alive() for worker in workers)
        feed.close()
        assert not any(worker.is_alive() for worker in workers)
