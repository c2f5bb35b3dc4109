"""`offramp generate`: a text from a running service, as it is said, coloured by where its tokens left."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping

from rich.console import Console
from rich.table import Column, Table

from offramp.client.client import Client
from offramp.client.generation import Generation, Prompt
from offramp.commands.options import GenerateJob

COLOURS = ("bright_green", "bright_cyan", "bright_yellow", "bright_magenta", "bright_blue", "bright_red")
"""Of the ramps, the earliest first, over and over. Tokens that ran all blocks have the terminal's own colour."""


def run(job: GenerateJob) -> None:
    """Print the answer as it comes, and with `exits` where its tokens left."""
    with Client(job.url, job.timeout_s, api_key=job.api_key) as client:
        ours = client.generates()["offramp"]
        asked: Prompt = job.prompt if job.raw or not ours["chats"] else [{"role": "user", "content": job.prompt}]
        ramps = sorted(ours["ramps"]) if job.exits else []
        colours = {block: COLOURS[k % len(COLOURS)] for k, block in enumerate(ramps)}
        drawn = job.model_dump(include={"max_tokens", "temperature", "top_p", "seed", "stop"})
        with client.stream(asked, **drawn) as pieces:
            console = Console(highlight=False)
            for piece in pieces:
                style = colours.get(piece.exits[-1]) if piece.exits else None
                console.print(piece.text, style=style, end="", markup=False, soft_wrap=True)
            console.print()
            if job.exits:
                console.print(table_of(pieces.whole(), colours, ours["num_blocks"]))
            if (cut_short := pieces.whole().cut_short) is not None:
                print(f"note: {cut_short}", file=sys.stderr)


def table_of(found: Generation, colours: Mapping[int, str], num_blocks: int) -> Table:
    """Returns the number of tokens that left after each ramp or ran all blocks, in the ramps' colours."""
    columns = (Column(name, justify="right") for name in ("left after block", "tokens", "share"))
    table = Table(*columns, title=f"{len(found.exits)} tokens after {found.num_prompt}, ended by {found.ended}")
    for block, number in sorted(Counter(found.exits).items()):
        share = f"{number / len(found.exits):.1%}"
        name = "all blocks" if block == num_blocks - 1 else str(block)
        table.add_row(name, str(number), share, style=colours.get(block))
    return table
