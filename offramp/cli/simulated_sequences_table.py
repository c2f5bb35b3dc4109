"""What became of simulated sequences, as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offramp.cli.options import make_table, milliseconds

if TYPE_CHECKING:
    from rich.table import Table

    from offramp.commands.simulate_sequences import SimulatedSequences


def sequence_tables(simulated: SimulatedSequences) -> list[Table]:
    """Sequences beside what the cost model says of them, and where tokens left."""
    figures, expected = simulated.figures, simulated.expected
    title = f"Simulated, {figures.seconds:.4g} s, {figures.sequences} sequences"
    table = make_table("", "planned", "simulated", title=f"{title}, INTERRUPTED" if simulated.interrupted else title)
    table.add_row("tokens", f"{expected.tokens_per_s:.1f}/s at most", f"{figures.tokens_per_s:.1f}/s")
    table.add_row("within both SLOs", "", f"{figures.in_slo} sequences, {figures.goodput_per_s:.2f}/s")
    table.add_row("first token p50", "", _shown(figures.ttft_p50_s))
    table.add_row("first token p99", f"{milliseconds(expected.ttft_s)} ms at worst", _shown(figures.ttft_p99_s))
    table.add_row("per token p50", f"{milliseconds(expected.token_s)} ms on average", _shown(figures.tpot_p50_s))
    table.add_row("per token p99", f"{milliseconds(expected.most_token_s)} ms at worst", _shown(figures.tpot_p99_s))
    table.add_row("refused", "", f"{figures.refused} of {figures.sequences}")
    return [table, _exits(simulated)]


def _shown(seconds: float | None) -> str:
    return "-" if seconds is None else f"{milliseconds(seconds)} ms"


def _exits(simulated: SimulatedSequences) -> Table:
    table, tokens = make_table("after block", "tokens", "share", title="Tokens by exit"), sum(simulated.exits.values())
    for block, number in sorted(simulated.exits.items()):
        table.add_row(str(block), str(number), f"{number / tokens:.2%}")
    return table
