"""What listens to a run: the hooks, the run as they see it, and the order in which they are called.

Hooks of one run, in order (all in the driver's process, between rounds, one callback after the other):

    on_start        once in a process, before its first round
    on_session      the server and its clients are up: at the start, and again after a loss
    on_round        after every round, when its metrics are in the run directory
    on_checkpoint   when everything up to a round is on disk and its checkpoint is being written
    on_rollback     actors were lost: the rounds after a checkpoint are forgotten and run again
    on_event        something worth reporting happened outside of a round's own report
    on_complete     the last round is done, the actors are alive, the run is not yet called finished
    on_end          the run is finished and all of its files are written
    on_failure      the run ends by an error (it can be resumed)
    on_close        last of all, however the run ends: release what `on_start` opened

Callbacks are called in this order: the run store, progress, those of the setting `callbacks`, those given in Python,
loggers, Ray metrics, checkpoints, the mirror in an object store, and what completes a run (figure data, models,
summary). Because checkpoints come after the user's callbacks, every round reaches every callback at least once,
whatever is killed when; a round that is run again has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipelago.core.causes import USERS, cause_of, refuse_end
from archipelago.core.errors import UserError
from archipelago.core.plugins import import_path
from archipelago.core.registry import Registry
from archipelago.core.settings import ExperimentSettings

if TYPE_CHECKING:
    from actors.reports import RoundReport
    from actors.session import Session
    from archipelago.runs.directory import RunDirectory


class CallbackFailure(UserError):
    """A user's callback raised; says which one, in which round and why. The run can be resumed."""

    kind = "users-code"


class LiveRun:
    """A run that is under way, as callbacks see it. Its files are in `path`; `open_run(run.path)` reads them."""

    def __init__(self, config: ExperimentSettings, directory: RunDirectory, sweep: str | None = None) -> None:
        self.config = config
        self.directory = directory  # for the platform's own callbacks: the only writers of these files
        self.sweep = sweep  # the name of the sweep that the run is a trial of
        self.round = 0  # rounds that are done, in this process or an earlier one
        self.resumed = False  # whether an earlier process began the run
        self.in_working_copy = False  # whether `path` is a copy on this node of what is in an object store
        self.where = ""  # this process, or the Ray cluster
        self.session: Session | None = None
        self.stop_reason: str | None = None
        self.emit: Callable[..., None] = lambda hook, *arguments: None  # for the platform's own callbacks

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.directory.path

    @property
    def name(self) -> str:
        """What the run directory is called."""
        return self.path.name

    @property
    def shared(self) -> Path:
        """The folder for what all runs of a sweep, or of a folder of runs, have in common."""
        if self.in_working_copy:  # of an object store, which gets the files of the run alone
            return self.path
        path = self.path.resolve()
        return path.parent.parent if self.sweep else path.parent

    @property
    def rounds(self) -> int:
        """Rounds that were asked for; the run may be stopped before."""
        return self.config.rounds

    @property
    def is_last_round(self) -> bool:
        """Whether no round follows, because all are done or because a callback stopped the run."""
        return self.round >= self.rounds or self.stop_reason is not None

    @property
    def history(self) -> list[dict[str, Any]]:
        """The rows of `metrics.csv` up to `round`: what a callback rebuilds its state from after a resume."""
        from archipelago.runs.files import read_numbers

        return [row for row in read_numbers(self.path / "metrics.csv") if row["round"] <= self.round]

    def stop(self, reason: str) -> None:
        """End the run after this round: it is finished, and its status says why."""
        if self.stop_reason is None:
            self.stop_reason = reason

    def note(self, text: str) -> None:
        """Report something: on the terminal and in `events.jsonl`."""
        self.emit("on_event", text)

    def models(self) -> dict[str, Any]:
        """The server's models by name, fetched now: flat vectors (P,), or one row per cluster (K, P)."""
        if self.session is None:
            raise RuntimeError("models are at hand between on_round and on_complete only")
        models: dict[str, Any] = self.session.models()["models"]
        return models


class Callback:
    """Listens to a run; override what you need. Runs in the driver's process, never inside an actor.

    A callback of the setting `callbacks` is made without arguments, or with `options` if its constructor has such a
    parameter: an object of its class's `Options` (a dataclass of `archipelago.core.settings.setting` fields), filled
    from the settings section called as the callback. Whatever a hook raises stops the run with a sentence; the run can
    be resumed. Hooks must not draw from global random states or change what they are given.

    >>> class Rounds(Callback):
    ...     def on_round(self, run, report):
    ...         print(f"round {report.round} of {run.rounds}")
    >>> from archipelago import run as experiment
    >>> _ = experiment(method="fedavg", rounds=2, storage=folder, name="heard", callbacks=[Rounds()], **quick)
    round 1 of 2
    round 2 of 2
    """

    @classmethod
    def check(cls, options: Any, config: ExperimentSettings) -> None:
        """Raise a `UserError` where the settings make no sense; called before anything is started."""

    def on_start(self, run: LiveRun) -> None:
        """Before the first round of this process; `run.round` are done already (`run.history` has them)."""

    def on_session(self, run: LiveRun, text: str) -> None:
        """The server and its clients are up, or up again after a loss; `text` says where they live."""

    def on_round(self, run: LiveRun, report: RoundReport) -> None:
        """A round is done and its metrics are in the run directory."""

    def on_checkpoint(self, run: LiveRun, round: int) -> None:
        """Everything up to `round` is on disk; the checkpoint itself is written in the background."""

    def on_rollback(self, run: LiveRun, round: int) -> None:
        """Actors were lost. The run directory is back at `round`; later rounds will be reported again."""

    def on_event(self, run: LiveRun, text: str) -> None:
        """Something was reported by `run.note`."""

    def on_complete(self, run: LiveRun) -> None:
        """All rounds are done and `run.models()` still answers; the run is called finished after this."""

    def on_end(self, run: LiveRun) -> None:
        """The run is finished; its directory is complete."""

    def on_failure(self, run: LiveRun, error: BaseException) -> None:
        """The run ends by `error`, an interruption by the user included."""

    def on_close(self, run: LiveRun) -> None:
        """The last call, after success, failure or a pause: release what `on_start` opened."""


CALLBACKS: Registry[type[Callback]] = Registry("callback", base=Callback)

_ALWAYS = ("on_failure", "on_close")  # called for everybody, whatever another callback raises


class CallbackList:
    """The callbacks of one run, called in order; `users` are those whose errors get a sentence that names them."""

    def __init__(self, callbacks: Sequence[Callback], users: Iterable[Callback] = ()) -> None:
        self._callbacks = list(callbacks)
        self._users = {id(each) for each in users}

    def emit(self, run: LiveRun, hook: str, *arguments: Any) -> None:
        """Call one hook of every callback."""
        for callback in self._callbacks:
            try:
                getattr(callback, hook)(run, *arguments)
            except USERS as error:
                refuse_end(error)
                if hook in _ALWAYS:  # the run ends anyway: the first error is the one to be seen
                    with suppress(Exception):
                        run.directory.note(
                            run.round, f"{name_of(callback)} failed in {hook}: {cause_of(error)}."
                        )
                elif id(callback) in self._users:
                    raise CallbackFailure(_sentence(callback, hook, run, error)) from error
                else:
                    raise

    @contextmanager
    def listening(self, run: LiveRun) -> Iterator[None]:
        """From `on_start` to `on_close`; an error in between, but not a pause, is an `on_failure`."""
        run.emit = lambda hook, *arguments: self.emit(run, hook, *arguments)
        try:
            self.emit(run, "on_start")
            yield
        except GeneratorExit:  # whoever asked for rounds stopped asking: the run will be continued
            raise
        except BaseException as error:
            self.emit(run, "on_failure", error)
            raise
        finally:
            self.emit(run, "on_close")


def name_of(callback: Callback) -> str:
    """What a callback is called in a sentence."""
    return str(getattr(callback, "callback_name", type(callback).__qualname__))


def _sentence(callback: Callback, hook: str, run: LiveRun, error: BaseException) -> str:
    when, then = f"in round {run.round}", f"mend it and resume the run, which is in {run.path}"
    if hook == "on_start":
        when = f"before round {run.round + 1}"
        then = then if run.resumed else "mend it and start the run again"
    elif hook == "on_end":
        when, then = "after the last round", f"the run itself is finished, in {run.path}"
    return f"Callback '{name_of(callback)}' failed {when} ({hook}): {cause_of(error)}; {then}."


# From settings to callbacks ---------------------------------------------------------------------------------


def options_of(entry: Any, config: ExperimentSettings) -> Any:
    """The options of a registered callback or logger: the settings section of its name, or its defaults."""
    return getattr(config, entry.section, None) or entry.options()


def check_callbacks(config: ExperimentSettings) -> None:
    """Refuse unknown callbacks, and settings that one of them cannot work with."""
    for name in config.callbacks:
        entry = CALLBACKS.entry_in("callbacks", name)
        entry.value.check(options_of(entry, config), config)


def callbacks_from(config: ExperimentSettings) -> list[Callback]:
    """The callbacks that the setting `callbacks` names, in its order."""
    made = []
    for name in config.callbacks:
        entry = CALLBACKS.entry(name)
        callback = make_with(entry.value, f"callback '{name}'", options=options_of(entry, config))
        callback.callback_name = name
        made.append(callback)
    return made


def make_with(maker: Callable[..., Any], what: str, **known: Any) -> Any:
    """Call a class or function with those of the known arguments that it has parameters for."""
    import inspect

    parameters = inspect.signature(maker).parameters.values()
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    missing = [each.name for each in named if each.default is each.empty and each.name not in known]
    if missing:
        raise UserError(
            f"Expected {what} to need nothing but {', '.join(known)}, got one that needs {', '.join(missing)} too: "
            "give the others defaults, for example in a subclass.",
            code="needs-arguments", missing=missing,
        )  # fmt: skip
    try:
        return maker(**{each.name: known[each.name] for each in named if each.name in known})
    except UserError:
        raise
    except USERS as error:  # whatever the user's own code raises
        refuse_end(error)
        raise UserError(
            f"{what[:1].upper()}{what[1:]} cannot be made: {cause_of(error)}.",
            code="cannot-be-made", name=what,
        ) from error  # fmt: skip


def path_of(callback: type[Callback]) -> str:
    """The name or import path under which other processes find a callback class."""
    for name, entry in CALLBACKS.items():
        if entry.value is callback:
            return name
    return import_path(callback)
