"""`offramp generate`: prints a generated text as it arrives, with tokens coloured by their exits."""

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
"""Colours of the ramps in their order, repeated. Tokens that ran all blocks are not coloured."""


def run(job: GenerateJob) -> None:
    """Prints the answer as it arrives, and with `exits` the blocks after which its tokens left."""
    with Client(job.url, job.timeout_s, api_key=job.api_key) as client:
        facts = client.generates()["offramp"]
        prompt: Prompt = job.prompt if job.raw or not facts["chats"] else [{"role": "user", "content": job.prompt}]
        ramps = sorted(facts["ramps"]) if job.exits else []
        colours = {block: COLOURS[k % len(COLOURS)] for k, block in enumerate(ramps)}
        sampling = job.model_dump(include={"max_tokens", "temperature", "top_p", "seed", "stop"})
        with client.stream(prompt, **sampling) as pieces:
            console = Console(highlight=False)
            for piece in pieces:
                style = colours.get(piece.exits[-1]) if piece.exits else None
                console.print(piece.text, style=style, end="", markup=False, soft_wrap=True)
            console.print()
            if job.exits:
                console.print(exits_table(pieces.result(), colours, facts["num_blocks"]))
            if (cut_short := pieces.result().cut_short) is not None:
                print(f"note: {cut_short}", file=sys.stderr)


def exits_table(answer: Generation, colours: Mapping[int, str], num_blocks: int) -> Table:
    """Returns the number of tokens that left after each ramp or ran all blocks, in the ramps' colours."""
    columns = (Column(name, justify="right") for name in ("left after block", "tokens", "share"))
    table = Table(*columns, title=f"{len(answer.exits)} tokens after {answer.num_prompt}, ended by {answer.ended}")
    for block, number in sorted(Counter(answer.exits).items()):
        share = f"{number / len(answer.exits):.1%}"
        name = "all blocks" if block == num_blocks - 1 else str(block)
        table.add_row(name, str(number), share, style=colours.get(block))
    return table
