"""Tasks: what an exit answers, how sure it is, and when two answers agree; `base.py` holds the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from earlyexit.errors import ModelFolderError
from earlyexit.named import NamedSpec, make_named

if TYPE_CHECKING:
    from earlyexit.tasks.base import Task

# Name -> where its Task is. A task is one file beside this one and one line here.
TASKS = {
    "label": "earlyexit.tasks.label:LabelTask",
    "pose": "earlyexit.tasks.pose:PoseTask",
    "regression": "earlyexit.tasks.regression:RegressionTask",
    "segmentation": "earlyexit.tasks.segmentation:SegmentationTask",
    "token": "earlyexit.tasks.token:TokenTask",
}


def find_task(spec: NamedSpec) -> Task:
    """The task that a model card names: `{"name": "label", "label_names": [...]}`, or `module:function` for one's own.

    Raises ModelFolderError for unknown names and for settings that the task does not take.
    """
    from earlyexit.tasks.base import Task

    task = make_named(spec, TASKS, called="task")
    if not isinstance(task, Task):
        raise ModelFolderError(f"{spec['name']!r} gave {type(task).__name__}; a Task is needed")
    return task
