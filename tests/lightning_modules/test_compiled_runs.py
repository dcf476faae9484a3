"""Whole experiments with the compiled engine: any layout, any method, recorded with the run and told by reports."""

import json
from contextlib import nullcontext

import numpy as np
import pytest

from archipelago import open_run
from archipelago.experiments.callbacks import CallbackFailure
from archipelago.experiments.runner import Drive, resume, run_experiment
from archipelago.reports.groups import make_groups
from archipelago.reports.tables import build_tables
from archipelago.runs.sweeps import find_trials
from lightning_modules.engines import ENGINES, default_engine
from lightning_modules.engines.compiled import build
from lightning_modules.engines.compiled import engine as compiled_engine
from lightning_modules.engines.compiled.build import CannotBuild, library
from tests.support.callbacks import StopAfter
from tests.support.experiments import config_of, outcome, run, session_of
from tests.support.runs import assert_equal_runs
from tests.support.written_runs import write_run

try:
    library()
except CannotBuild as missing:
    pytest.skip(str(missing), allow_module_level=True)

COMPILED = ("local.engine=compiled", "model=cnn_digits")
# Frozen logits, sample weights, penalties of parameters and of outputs, losses under K models, client functions.
METHODS = ("fedavg", "ifca+cam", "fedem", "wecfl+con+cks", "fedsoft", "ditto")


@pytest.mark.parametrize("method", METHODS)
def test_methods_give_the_same_bits_in_any_layout_and_the_numbers_of_the_loop(method):
    more = ("con.form=rep",) if "con" in method else ()
    settings = (f"method={method}", *more)
    whole = session_of(*settings, *COMPILED)
    reports = run(whole, 2)
    parts = session_of(*settings, *COMPILED, blocks=[[5], [0, 1, 2, 3, 4, 6, 7]])
    assert outcome(parts, run(parts, 2)) == outcome(whole, reports)
    assert not [note for report in reports for note in report.events if "loop" in note]
    loop = session_of(*settings, "model=cnn_digits")
    for found, expected in zip(reports, run(loop, 2), strict=True):
        for name, value in expected.metrics.items():
            if "loss" in name and isinstance(value, float):
                assert found.metrics[name] == pytest.approx(value, rel=1e-3), name


def test_fallback_is_a_note_of_the_round():
    session = session_of("local.engine=compiled", "model.target=tests.support.modules.DropoutModule")
    (note,) = [note for report in run(session, 2) for note in report.events if "compiled" in note]
    assert "falls back to loop" in note and "Dropout" in note


def test_run_that_stopped_with_one_instruction_set_continues_with_another_to_the_same_bytes(
    tmp_path, monkeypatch
):
    config = config_of("method=ifca", *COMPILED, f"storage={tmp_path}", "name=whole")
    whole = run_experiment(config, quiet=True)
    assert json.loads((whole / "environment.json").read_text())["compute"]["engine"] == "compiled"
    config = config_of("method=ifca", *COMPILED, f"storage={tmp_path}", "name=stopped", "checkpoint.every=1")
    with monkeypatch.context() as patch:
        patch.setenv("ARCHIPELAGO_KERNELS", "avx2")
        library.cache_clear()
        assert library().lanes() == 8  # AVX2, which every processor with kernels has
        with pytest.raises(CallbackFailure):
            run_experiment(config, quiet=True, callbacks=[StopAfter(2)])
    library.cache_clear()
    assert library().lanes() == {"avx512": 16, "avx2": 8}[build.chosen_instructions()[0]]
    resume(tmp_path / "stopped", quiet=True)
    assert_equal_runs(whole, tmp_path / "stopped")
    plain = run_experiment(
        config_of("method=fedavg", f"storage={tmp_path}", "name=plain", "rounds=1"), quiet=True
    )
    assert json.loads((plain / "environment.json").read_text())["compute"]["engine"] == "loop"


def test_table_says_when_rows_differ_in_their_engine(tmp_path):
    def notes(**engines):
        for method, engine in engines.items():
            path = tmp_path / "-".join([method, *engines.values()])
            write_run(path, method=method, seed=0, accuracy=[0.1, 0.2, 0.3])
            environment = path / "environment.json"
            known = json.loads(environment.read_text()) if environment.is_file() else {}
            environment.write_text(json.dumps({**known, "compute": {"engine": engine}}))
        paths = [tmp_path / "-".join([method, *engines.values()]) for method in engines]
        (table,) = build_tables(make_groups(find_trials(paths)))
        return [note for note in table.notes if "engine" in note]

    assert notes(ifca="compiled", fedavg="compiled") == []
    (note,) = notes(ifca="compiled", fedavg="loop")
    assert "compiled: IFCA; loop: FedAvg" in note and "rounding" in note


def without_kernels(patch, fails):
    """Those who ask for the kernels, in turn, do without where `fails` says so."""
    real, asked = library, iter(fails)

    def found():
        if next(asked):
            raise CannotBuild("there is no C compiler here (cc)")
        return real()

    patch.setattr(compiled_engine, "library", found)


def recorded(path):
    return json.loads((path / "environment.json").read_text())["compute"]


def test_run_records_the_engines_that_trained_not_the_one_that_was_asked_for(tmp_path, monkeypatch):
    def made(name, method, *more, fails, **extra):
        config = config_of(f"method={method}", *COMPILED, f"storage={tmp_path}", f"name={name}", *more)
        with monkeypatch.context() as patch:
            without_kernels(patch, fails)
            return run_experiment(config, quiet=True, **extra)

    events = {}
    paths = {
        "compiled": made("a", "ifca", "rounds=1", fails=[False]),
        "loop": made("b", "fedavg", "rounds=1", fails=[True]),
        "compiled and loop": made("c", "fesem", "rounds=1", "fleet.actors=2", fails=[False, True]),
    }
    for engines, path in paths.items():
        assert recorded(path)["engine"] == engines and f"engine {engines}," in recorded(path)["sentence"]
        events[engines] = "\n".join(open_run(path).events["text"])
        assert ("falls back to loop" in events[engines]) == ("loop" in engines)
        assert "from here on" not in events[engines]  # nothing was computed before
    (table,) = build_tables(make_groups(find_trials(list(paths.values()))))
    (note,) = [note for note in table.notes if "engine" in note]
    assert "compiled: IFCA; compiled and loop: FeSEM; loop: FedAvg" in note

    with pytest.raises(CallbackFailure):
        made("d", "ifca", "rounds=3", "checkpoint.every=1", fails=[True], callbacks=[StopAfter(2)])
    resume(tmp_path / "d", quiet=True)
    assert recorded(tmp_path / "d")["engine"] == "loop"
    (event,) = [text for text in open_run(tmp_path / "d").events["text"] if "from here on" in text]
    assert "engine compiled" in event.partition("before")[0] and "engine loop" in event.partition("before")[2]


def test_kernels_are_asked_for_before_anything_else_starts(tmp_path, monkeypatch):
    happened, covered, begin = [], compiled_engine.covered, compiled_engine.CompiledEngine.begin
    monkeypatch.setattr(
        compiled_engine, "covered", lambda *given: happened.append("an engine is made") or covered(*given)
    )
    monkeypatch.setattr(Drive, "_ray", lambda experiment: happened.append("Ray starts") or nullcontext(""))
    monkeypatch.setattr(
        compiled_engine.CompiledEngine, "begin", classmethod(lambda cls: happened.append("begin") or begin())
    )
    run_experiment(config_of("method=fedavg", *COMPILED, f"storage={tmp_path}", "rounds=1"), quiet=True)
    assert happened[:3] == ["begin", "Ray starts", "an engine is made"]


def test_auto_takes_it_where_it_covers_the_network_once_it_is_no_opt_in(monkeypatch):
    assert default_engine("cpu") == "loop" and default_engine("cuda") == "stacked"
    monkeypatch.delitem(ENGINES.entry("compiled").capabilities, "opt_in")
    assert default_engine("cpu") == "compiled" and default_engine("cuda") == "stacked"
    for settings, engine in (
        (("model=cnn_digits",), "compiled"),
        (("model.target=tests.support.modules.DropoutModule",), "loop"),
    ):
        session = session_of(*settings)
        run(session, 1)
        assert session.compute().engine == engine


def test_client_that_is_left_to_the_loop_is_recorded():
    session = session_of(*COMPILED, "local.optimizer=sgd")
    assert session.compute().engine == "compiled"
    (block,) = session.fleet.blocks
    block.engine._reason_against = lambda job, update: "a batch is too small" if job.client == 3 else ""
    run(session, 1)
    assert session.compute().engine == "compiled and loop"


def test_losses_of_models_go_through_the_kernels():
    session = session_of("method=ifca", *COMPILED)
    run(session, 1)
    (block,) = session.fleet.blocks if hasattr(session.fleet, "blocks") else session.fleet._blocks
    index = np.arange(20)
    vector = block.initial(1, "test")[0]
    assert np.array_equal(
        block.forward.outputs(vector, index).numpy(), block.engine.outputs(vector, index).numpy()
    )
