"""A page of llama.cpp's own definitions: `python3 llamacpp_page.py SERVER_TASK_CPP VERSION FILE`.

The server is C++, so its page is not run but read: the lists of counters and gauges in the function that renders `/metrics`, each with its
name and the expression of its value, which is evaluated over STATE. Numbers are written as a stream of C++ writes them: six figures.
"""
import re
import sys
from types import SimpleNamespace as Fields

import page

BUCKET = dict(n_per_second=lambda: 21.5)
STATE = dict(
    metrics=Fields(
        prompt=Fields(count=1234, time=3_210_000, steps=1234),
        predict=Fields(count=555, time=25_000_000, steps=553),
        prompt_bucket=Fields(**BUCKET),
        predict_bucket=Fields(**BUCKET),
        n_prompt_cached=300,
        n_decode=600,
        n_tokens_max=2048,
        n_busy_slots=1100,
        n_draft_tokens=90,
        n_draft_accepted=60,
        n_draft_verif_steps=30,
    ),
    n_processing_slots=2,
    n_tasks_deferred=1,
    max=max,
)
ITEM = re.compile(r'\{\s*"(\w+)",\s*"[^"]*",\s*(.+?)\s*\}\s*,', re.DOTALL)


def value(expression):
    python = expression.replace("(double) ", "").replace("std::max", "max")
    return float(eval(python, {"__builtins__": {}}, STATE))  # an expression of the file that was named


def rendered(source):
    body = source[source.index("std::string server_task_result_metrics::to_metrics()") :]
    for kind in ("counter", "gauge"):
        items = re.search(rf"{kind}s = \{{(.*?)\n    \}};", body, re.DOTALL).group(1)
        for name, expression in ITEM.findall(items + ","):
            yield f"# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value(expression):g}\n"


def main():
    source, version, path = sys.argv[1:]
    with open(source, encoding="utf-8") as file:
        text = "".join(rendered(file.read()))
    head = f"{version}: made by make/llamacpp_page.py from the definitions in tools/server/server-task.cpp, over its STATE"
    page.write(path, [head], text)


if __name__ == "__main__":
    main()
