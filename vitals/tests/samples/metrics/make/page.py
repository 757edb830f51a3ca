"""From an engine's page to the file that is kept: what nobody reads is left out, and the head says so."""

# what the agent sends (agent/src/sources/scrape.rs)
ACCEPT = "text/plain;version=0.0.4"
LEFT_OUT = "left out: HELP lines, the buckets of histograms, _created, python_*, and of process_* what nobody reads; sorted"
READ = ("process_open_fds", "process_start_time_seconds")


def exposition(registry):
    """A registry of prometheus_client as `/metrics` would answer the agent."""
    from prometheus_client.exposition import choose_encoder

    encode, _ = choose_encoder(ACCEPT)
    return encode(registry).decode()


def is_kept(line, zeros):
    name = line.split("{")[0].split(" ")[0]
    dull = name.startswith(("python_", "process_")) and name not in READ
    return not dull and not name.endswith(("_created", "_bucket")) and (zeros or float(line.split()[-1]) != 0)


def kept(text, zeros):
    """Samples that are kept, under the TYPE line of theirs, in order; the end that OpenMetrics has stays at the end."""
    families, head = {}, ""
    for line in filter(None, text.splitlines()):
        if line.startswith("# TYPE"):
            head = line
        elif not line.startswith("#") and is_kept(line, zeros):
            families.setdefault(head, []).append(line)
    lines = [line for head in sorted(families) for line in [head, *sorted(families[head])]]
    return lines + ["# EOF"] * text.rstrip().endswith("# EOF")


def write(path, head, text, zeros=True):
    left_out = LEFT_OUT if zeros else LEFT_OUT.replace("; sorted", ", what is 0; sorted")
    lines = [f"# {line}" for line in head + [left_out]] + kept(text, zeros)
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    print(path, len(lines), "lines")
