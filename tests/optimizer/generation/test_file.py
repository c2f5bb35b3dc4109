"""`generation:` in problem files."""

from __future__ import annotations

from pathlib import Path

from optimizer.generation.demand import KvSpec
from optimizer.problems.problem import Slo
from optimizer.problems.problem_file import parse_problem, problem_document, read_problem
from tests.offramp.cli.runs import written
from tests.optimizer.generation.sequences import asking, two_blocks

FILE = (Path(__file__).parents[1] / "files/generation.yaml").read_text(encoding="utf-8")


def test_the_section_generation_is_read_back_as_written(tmp_path: Path) -> None:
    problem = read_problem(written(tmp_path / "problem.yaml", FILE)).problem
    generation = problem.generation
    assert problem.slo == Slo(latency_s=0.1, slack=0.1)
    assert generation is not None
    assert (generation.prompt.mean, generation.output.mean, generation.num_steps) == (120, 8, 7)
    assert (generation.ttft_s, generation.fill, generation.copy_share) == (1.0, "copy", 0.06)
    assert (generation.regroup_s, generation.most_running, generation.chunk) == (0.0005, 32, 64)
    assert generation.late_head
    assert generation.prefill is not None
    assert generation.prefill["gpu"].length == 128
    assert (problem.latency["gpu"].context, problem.latency["gpu"].context_s) == (64, 1e-6)
    assert generation.kv == KvSpec(
        bytes_per_token=1000, weights_bytes=1e6, memory_bytes={"gpu": 2e7}, page_tokens=8, reserved_tokens=200
    )
    assert generation.held_tokens == 203.5
    kv = KvSpec(bytes_per_token=10.0, memory_bytes={"gpu": 1e6})
    problem = asking(two_blocks(), kv=kv, ttft_s=3.0, chunk=4)
    again = parse_problem(problem_document(problem)).problem
    assert again.generation == problem.generation
    assert problem_document(again) == problem_document(problem)
    assert again.latency["gpu"].context_s == problem.latency["gpu"].context_s


def test_lengths_may_stand_in_a_file_of_their_own_or_in_a_trace(tmp_path: Path) -> None:
    (tmp_path / "answers.txt").write_text("10\n30\n", encoding="utf-8")
    text = FILE.replace("[4, 8, 12]", "answers.txt")
    problem = read_problem(written(tmp_path / "problem.yaml", text)).problem
    assert problem.generation is not None
    assert problem.generation.output.shares == ((10, 0.5), (30, 0.5))
    (tmp_path / "azure.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,100,4\nx,300,8\n", encoding="utf-8")
    text = FILE.replace("  prompt_tokens: 120\n  output_tokens: [4, 8, 12]\n", "  lengths: azure.csv\n")
    generation = read_problem(written(tmp_path / "problem.yaml", text)).problem.generation
    assert generation is not None
    assert (generation.prompt.mean, generation.output.mean, generation.recorded) == (200, 6, ((100, 4), (300, 8)))
