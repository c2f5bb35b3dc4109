"""Tasks: the meaning of an exit's outputs. `base.py` has the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from earlyexit.named import NamedSpec, make_named

if TYPE_CHECKING:
    from earlyexit.tasks.base import Task

# Name -> import path of its Task. To add a task, write one file in this folder and add one line here.
TASKS = {
    "label": "earlyexit.tasks.label:LabelTask",
    "pose": "earlyexit.tasks.pose:PoseTask",
    "regression": "earlyexit.tasks.regression:RegressionTask",
    "segmentation": "earlyexit.tasks.segmentation:SegmentationTask",
    "token": "earlyexit.tasks.token:TokenTask",
}


def find_task(spec: NamedSpec) -> Task:
    """Returns the task of a model card, such as `{"name": "label", "label_names": [...]}`.

    The name can also be a user's own `module:function`. Raises ModelFolderError for unknown names and invalid settings.
    """
    from earlyexit.tasks.base import Task

    return make_named(spec, TASKS, Task)  # type: ignore[type-abstract] # it is not called
