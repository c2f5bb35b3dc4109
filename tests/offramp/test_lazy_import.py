from __future__ import annotations

import subprocess
import sys


def test_importing_offramp_loads_no_http_library_until_a_client_is_asked_for_and_then_nothing_of_a_service() -> None:
    code = (
        "import sys, offramp; heavy = {'httpx', 'aiohttp', 'httptools', 'torch', 'ray', 'numpy'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules);"
        "offramp.Client, offramp.AsyncClient, offramp.__version__; assert 'httpx' in sys.modules;"
        "heavy = {'torch', 'ray', 'tokenizers', 'starlette', 'scipy', 'deployments.api.completions.bodies'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
