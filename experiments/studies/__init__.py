"""One study per figure or table of the papers' evaluations, with claim, result, and reason for differences."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from experiments.studies.study import Study

FIGURES: tuple[str, ...] = tuple(
    path.stem
    for of in ("fig", "apparate_", "pame_", "tcb_", "tabi_")
    for path in sorted(Path(__file__).parent.glob(f"{of}*.md"))
)
"""Studies in the order of the papers, E3's first. A new study is a Markdown file here and a `Study` in a module."""
MODULES = {
    "cascades": ("tabi_candidates", "tabi_table2", "tabi_v100"),
    "decoding": ("fig10_translation", "fig11_summarization", "fig12_llama"),
    "distilled_bert": ("fig02_savings", "fig09_distilbert"),
    "exit_search": ("pame_fig09_latency", "pame_fig12_places", "pame_fig14_moving_on", "pame_fig15_number"),
    "following": ("fig16_adaptation",),
    "goodput": (
        *("fig07_homogeneous", "fig08_vision", "fig18_pabee", "fig23_error_tolerance", "fig24_slo"),
        *("fig25_ramps_inside", "fig26_no_model_parallelism"),
    ),
    "least_cost": ("fig14_gpus_needed", "fig15_cost"),
    "load_changes": ("pame_fig16_load_changes",),
    "overlapping": ("pame_fig18_parallel_batches",),
    "packing": ("tcb_fig11_fcfs", "tcb_fig12_fcfs_variance", "tcb_fig13_slots", "tcb_fig14_slots_large"),
    "scheduling": ("tcb_fig09_utility", "tcb_fig10_throughput", "tcb_fig15_orders", "tcb_fig16_overhead"),
    "served": (
        *("apparate_fig12_ramp_adjustment", "apparate_fig13_savings"),
        *("apparate_table1_tuning", "apparate_table2_strategies", "apparate_table3_budgets"),
    ),
}
"""Studies that share a module. Every other study has a module of its own name."""


def load(name: str) -> Study:
    """Returns a study by its name; a dotted name is a module of another package.

    Modules load one by one, so a broken module affects only its own rows of the report.
    """
    module = next((module for module, names in MODULES.items() if name in names), name)
    found = vars(import_module(module if "." in module else f"{__name__}.{module}")).values()
    return next(each for each in found if isinstance(each, Study) and each.about.name == name.rpartition(".")[2])
