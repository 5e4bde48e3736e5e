"""Scripts under `headrace run`: what they print is the same, and their parts are replayed."""

from __future__ import annotations

import functools
import gc
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import fake
from headrace.fake import run_program
from headrace.records import RunResult
from headrace.run import RunSettings, run_sped_up
from headrace.run.text import table_of

HEAD = """
    import sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(
                nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)
            )

        def forward(self, x):
            return self.body(x)

    def made(**options):
        net = Net().to(device)
        return net, torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True, **options)

    data = TensorDataset(torch.randn(48, 4), torch.randint(0, 3, (48,)))
    loss_of = nn.CrossEntropyLoss()
    def show(*models):
        print([float(p.detach().double().sum()) for one in models for p in one.parameters()])
"""


class Ended:
    """A script that has run sped up."""

    def __init__(self, folder: Path, script: str, *arguments: str, **settings: Any) -> None:
        self.path = folder / "train.py"
        self.path.write_text(textwrap.dedent(HEAD) + textwrap.dedent(script), encoding="utf-8")
        self.arguments = arguments
        self.settings = RunSettings(**{"after": 3, "plan": "graph", **settings})
        self.told: list[str] = []
        self.results: list[RunResult | None] = []
        self.exit_code: int | None = None

    def run(self) -> Ended:
        self.exit_code = run_sped_up(
            *(str(self.path), self.arguments),
            as_module=False,
            settings=self.settings,
            tell=self.told.append,
            ended=self.results.append,
            fake=True,
            is_own_process=False,
        )
        return self

    @property
    def result(self) -> RunResult:
        (found,) = self.results
        assert found is not None
        return found

    def replays(self) -> dict[str, int]:
        return {part.name: part.replays for part in self.result.parts}


@pytest.fixture
def both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Run a script as it is, then sped up, and require the same output and exit code."""

    def run(script: str, *arguments: str, **settings: Any) -> Ended:
        ended = Ended(tmp_path, script, *arguments, **settings)
        plain = run_program(str(ended.path), arguments, as_module=False)
        expected = capsys.readouterr()
        ended.run()
        found = capsys.readouterr()
        assert found.out == expected.out
        assert found.err == expected.err
        assert ended.exit_code == plain.exit_code
        assert ended.result.races == len(plain.findings) == 0
        return ended

    yield run
    gc.collect()  # a script's names, and what they hold: persistent workers too


LOOP = """
    net, optimizer = made()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    for epoch in range(2):
        for x, y in DataLoader(data, batch_size=4, shuffle=True, num_workers=WORKERS):
            x, y = x.to(device), y.to(device, non_blocking=True)
            loss = loss_of(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            print(loss.item())
        net.eval()
        with torch.no_grad():
            print(net(data.tensors[0].to(device)).sum().item())
        net.train()
    show(net)
"""


def test_a_loop_is_the_same_and_all_its_parts_are_found(both: Any) -> None:
    ended = both(LOOP.replace("WORKERS", "0"))
    assert ended.replays() == {"Net": 20, "AdamW": 17, "DataLoader": 0}  # one is checked
    net, optimizer, loader = ended.result.parts
    assert net.line.text == "loss = loss_of(net(x), y)"
    assert optimizer.line.text == "optimizer.step()"
    assert loader.eager == {"copied when the script moves it": 46}
    line = net.line.line
    assert f"Net (train.py:{line}) is replayed as a graph from now on" in str(ended.told).replace(
        str(ended.path.parent) + "/", ""
    )
    assert ended.result.steps == 24
    text = table_of(ended.result)
    assert "part" in text
    assert "DataLoader" in text


def test_batches_of_worker_processes_are_copied_ahead(both: Any) -> None:
    ended = both(LOOP.replace("WORKERS", "1"))
    loader = ended.result.parts[-1]
    # Of 24 batches, two show what the script moves. Each epoch begins without one fetched ahead.
    assert loader.replays == 2 * 24 - 2 * 4
    assert loader.why is None


def test_a_data_set_at_the_address_of_another_is_learned_anew(both: Any) -> None:
    ended = both(
        """
        class Rows:
            __slots__ = "rows"
            def __init__(self, *columns):
                self.rows = list(zip(*columns))
            def __len__(self):
                return len(self.rows)
            def __getitem__(self, at):
                return self.rows[at]
        net, optimizer = made()
        x, y = data.tensors
        def step(inputs, targets):
            optimizer.zero_grad()
            loss_of(net(inputs.to(device)), targets.to(device)).backward()
            optimizer.step()
        for _ in range(5):
            for inputs, targets in DataLoader(Rows(x, y), 24):
                step(inputs, targets)
            for targets, inputs, _ in DataLoader(Rows(y, x, y), 12):
                step(inputs, targets)
        show(net)
        """
    )
    loaders = [part for part in ended.result.parts if part.kind == "data"]
    # After the first step, two tensors of each of two batches, and of four.
    assert [sum(part.eager.values()) for part in loaders] == [5 * 2 * 2 - 2, 5 * 4 * 2]


def test_only_some_kinds_of_parts(both: Any) -> None:
    loop = LOOP.replace("WORKERS", "0")
    assert both(loop, only=frozenset({"optimizer"})).replays().keys() == {"AdamW"}
    assert both(loop, only=frozenset({"model"})).replays().keys() == {"Net"}


def test_a_script_on_the_cpu_is_left_alone(both: Any) -> None:
    script = LOOP.replace("WORKERS", "0").replace("made()", 'made()\n    device = "cpu"', 1)
    ended = both(f'    device = torch.device("cpu")\n{script}')
    assert (ended.result.parts, ended.told) == ((), [])
    assert ended.result.cpu_steps == 24
    assert "trained on the CPU" in table_of(ended.result)


def test_checked_replays_are_equal_and_change_nothing(both: Any) -> None:
    ended = both(LOOP.replace("WORKERS", "0"), check=4)
    checks = [part.check for part in ended.result.parts if part.kind != "data"]
    assert [(one.replays, one.is_equal, one.worst) for one in checks if one is not None] == [
        (4, True, 0.0)
    ] * 2
    assert "bit for bit" in table_of(ended.result)


def test_a_trained_model_can_be_scripted_and_copied(both: Any) -> None:
    ended = both("""
        import copy, io, warnings
        warnings.simplefilter("ignore")
        net, optimizer = made()
        for step in range(12):
            loss = net(torch.randn(4, 4, device=device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == 8:
                buffer = io.BytesIO()
                torch.save(net.state_dict(), buffer)
                show(copy.deepcopy(net))
        print(type(torch.jit.script(net)).__name__, sorted(net.state_dict()))
        net(torch.randn(4, 4, device=device)).sum().backward()
    """)
    assert ended.replays()["Net"] > 5


def test_a_class_can_be_scripted(both: Any) -> None:
    """TorchScript finds the names of a class in the frame that scripts it."""
    ended = both(
        """
        @torch.jit.script
        def doubled(x: torch.Tensor):
            return 2 * x
        @torch.jit.script
        class Doubling:
            def __init__(self, times: int):
                self.times = times
            def __call__(self, x: torch.Tensor):
                for _ in range(self.times):
                    x = doubled(x)
                return x
        print(Doubling(3)(torch.ones(1)))
        """
    )
    assert ended.exit_code in (None, 0)


def test_persistent_workers_draw_as_in_the_script_alone(both: Any) -> None:
    """Their random numbers go on where a pass was left early."""
    ended = both("""
        class Noise(torch.utils.data.Dataset):
            def __len__(self):
                return 40

            def __getitem__(self, at):
                return torch.randn(4) + at

        net, optimizer = made()
        loader = DataLoader(Noise(), 4, shuffle=True, num_workers=1, persistent_workers=True)
        for epoch in range(3):
            for at, x in enumerate(loader):
                loss = net(x.to(device)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print(loss.item())
                if at == 6:
                    break
    """)
    assert ended.result.parts[-1].replays == 3 * 7 - 2 - 3


@pytest.mark.parametrize("after", [2, 3])
def test_models_that_are_trained_in_turn_are_freed_in_turn(both: Any, after: int) -> None:
    """A model, its optimizer and their graphs hold each other. Each leaves its row."""
    ended = both(
        """
        import weakref
        held = []
        def train():
            net, optimizer = made()
            for step in range(8):
                loss = net(torch.randn(4, 4, device=device)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            held.extend([weakref.ref(net), weakref.ref(optimizer)])
            print(loss.item())
        for number in range(3):
            train()
        print([one() is None for one in held[:4]])
        """,
        after=after,
    )
    replays = ended.replays()
    assert list(replays) == ["Net", "AdamW", "Net 2", "AdamW 2", "Net 3", "AdamW 3"]
    assert min(replays.values()) > 0
    assert len(set(replays.values())) == 2


def test_a_traceback_that_the_script_prints_has_no_frames_of_ours(both: Any) -> None:
    ended = both("""
        import logging, traceback

        class Failing(Net):
            def forward(self, x, fail):
                if fail:
                    raise ValueError("a bad batch")
                return self.body(x)

        net = Failing().to(device)
        for step in range(6):
            try:
                net(torch.randn(4, 4, device=device), fail=step % 2).sum().backward()
            except ValueError as problem:
                logging.exception("failed")
                traceback.print_exc()
                traceback.print_tb(problem.__traceback__)
                print(traceback.format_exc(), traceback.extract_tb(problem.__traceback__))
    """)
    assert ended.result.parts[0].name == "Failing"


FOLDS = """
    def trained(layers):
        torch.manual_seed(0)
        body = [one for _ in range(layers) for one in (nn.Linear(4, 4), nn.Tanh())]
        net = nn.Sequential(*body, nn.Linear(4, 3)).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
        for step in range(62):
            loss = loss_of(net(data.tensors[0].to(device)), data.tensors[1].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        show(net)
    trained(2)
    trained(4)
"""


@pytest.mark.parametrize("launch_us", [0.0, 100.0])
def test_what_is_faster_stays(both: Any, monkeypatch: pytest.MonkeyPatch, launch_us: float) -> None:
    """Each model is compared for itself: the second comes when the first has been chosen."""
    costs = fake.Costs(launch_us=launch_us)
    monkeypatch.setattr(fake, "fake_cuda", functools.partial(fake.fake_cuda, costs=costs))
    ended = both(FOLDS, plan="auto")
    first, second = ended.result.decisions
    assert first in ended.told
    assert second in table_of(ended.result)
    whys = {part.why for part in ended.result.parts}
    if launch_us:
        assert ": graphs are used" in first
        assert ": graphs are used" in second
        assert whys == {None}
    else:
        assert first.endswith("no graphs are used")
        assert second.endswith("no graphs are used")
        assert whys == {"graphs gain nothing in this loop"}
