"""The Hydra sweeper behind ``-m``. It only lists the jobs; the launcher composes and checks them.

Hydra's own sweeper creates the sweep's directory before anything is checked, and composes every job once more to check
it. The class is defined here because Hydra takes a sweeper only from a class under ``hydra_plugins``. It must not be
imported before Hydra has searched for plugins, since that loads the module of the base class a second time.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn

from hpc_train.launch.launcher import HpcTrainLauncher, end


class HpcTrainSweeper(BasicSweeper):
    """Takes every combination of the values that are listed with commas, as Hydra's basic sweeper does.

    ``hydra.sweeper.params`` are among the arguments already.
    """

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        """Launches the jobs of ``arguments``; returns the launcher's results, one list per batch.

        Raises SystemExit if a job did not end well; the jobs of later batches have run nevertheless.
        """
        assert self.hydra_context is not None and self.launcher is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        results: list[Sequence[JobReturn]] = []
        first = 0
        for batch in self.split_arguments(parser.parse_overrides(arguments), self.max_batch_size):
            results.append(self.launcher.launch(batch, initial_job_idx=first))
            first += len(batch)
        if isinstance(self.launcher, HpcTrainLauncher):
            end([result for batch in results for result in batch])
        return results
