"""Ray Tune's side of a trial: the process that Tune starts, steps and uses again for the next one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ray import tune

from archipelago.core.errors import UserError
from archipelago.core.plugins import PLUGIN
from archipelago.experiments.config import config_from_yaml
from archipelago.experiments.plan import run_title
from archipelago.runs.storage import sibling
from archipelago.sweeps.trial import FAILED, TrialRun
from archipelago.sweeps.trial_watch import announce


def _return_to_working_directory() -> None:
    """Tune moves into a folder of its own, but paths and plug-ins of settings are relative to where the user was."""
    os.chdir(os.environ.get("TUNE_ORIG_WORKING_DIR", "."))


class TuneTrial(tune.Trainable):
    """A `TrialRun` as Ray Tune drives it."""

    _trial_run: TrialRun | None = None
    _refusal: UserError | None = None  # why this process can run no trial
    _first = ""

    def __repr__(self) -> str:
        """What Ray's dashboard and logs call the process: Ray asks once, and it may run other trials later."""
        return f"trials-from-{self._first}" if self._first else "trials"

    def setup(self, config: dict[str, Any]) -> None:
        """Nothing is begun before the first step: a state may still be handed over."""
        _return_to_working_directory()
        try:
            self._first = run_title(config_from_yaml(config["payload"]["settings"]))
            self._prepare(config)
        except UserError as error:
            # A process that raises here is started again and again. Another one would have the same answer.
            self._refusal = error

    def _prepare(self, config: dict[str, Any]) -> None:
        _return_to_working_directory()
        config = config["payload"]
        announce(config["label"], str(self.trial_name))
        given = {key: value for key, value in config.items() if key not in ("trial", "address", "bundles")}
        # In a population a config may be another trial's; the name is this one's own.
        self._trial_run = TrialRun(sibling(config["address"], str(self.trial_name)), **given)

    def step(self) -> dict[str, Any]:
        """Some rounds; or the sentence that says why there are none."""
        if self._refusal is not None:
            refused = str(self._refusal) if self._refusal.code == PLUGIN else ""
            return {"state": FAILED, "reason": str(self._refusal), "refused": refused, "done": True}
        assert self._trial_run is not None
        return self._trial_run.step()

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """For a trial that is to be paused, or taken over."""
        assert self._trial_run is not None
        self._trial_run.save(Path(checkpoint_dir))

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Continue from there, with the values of this trial's config."""
        assert self._trial_run is not None
        self._trial_run.take_over(Path(str(checkpoint)), self.config["payload"]["values"])

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """The next trial in the same process."""
        self.cleanup()
        try:
            self._prepare(new_config)
        except UserError as error:
            self._refusal = error
        return True

    def cleanup(self) -> None:
        """Leave the run as it can be resumed."""
        if self._trial_run is not None:
            self._trial_run.close()
        self._trial_run = self._refusal = None
