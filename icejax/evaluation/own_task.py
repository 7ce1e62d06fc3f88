"""Tasks of lm-evaluation-harness whose samples come from icejax: made with the model's tokenizer, or read from local files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
from lm_eval.api.task import ConfigurableTask


class OwnTask(ConfigurableTask):
    """A task of given samples, all of which are tested."""

    def __init__(self, rows: Sequence[dict[str, Any]], **config: Any) -> None:
        """Takes the samples, and the harness's config of the task without a data set."""
        self._rows = list(rows)
        super().__init__(config=dict(test_split="test", metadata=dict(version=1.0)) | config)

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
        """Sets the samples. The harness's own way, `custom_dataset`, warns of options that it could take."""
        self.dataset = {"test": datasets.Dataset.from_list(self._rows)}
