"""What it costs that dead letters are heard of: the same deaths with and without events, in turns."""

from bench import ours
from bench.failing import BATCH, bury
from bench.lab import Bar, Figure, Findings, Lab, script

SILENT = """
create or replace function bartleby.emit_letters(p_type text, p_queue integer, p_data jsonb, p_ids bigint[],
  p_cycles integer[], p_sequences integer[]) returns void language plpgsql as $$ begin end $$
"""
SINK = "select bartleby.put_sink('bus-{}', 'log', '{{}}', 'bench', 'measured')"


def emission(lab: Lab) -> Findings:
    """Dead letters per second with events for no, one and three sinks, against none at all."""
    found = Findings()
    count = lab.scaled(40_000, 10_000)
    for sinks in (0, 1, 3):
        with lab.database() as told, lab.database() as silent:
            heard, mute = ours.Client(told), ours.Client(silent)
            script(mute.durable, SILENT)
            for number in range(sinks):
                script(heard.durable, SINK.format(number))
            for queue in (heard, mute):
                queue.create()
                queue.fill(count)
            spent: list[list[float]] = [[0.0, 0.0], [0.0, 0.0]]
            pairs = list(zip((heard, mute), spent, strict=True))
            for _ in range(0, count, BATCH):
                pairs.reverse()  # neither is always the second
                for queue, times in pairs:
                    bury(queue, times)
            heard.close()
            mute.close()
        rates = [count / times[1] for times in spent]
        name = f"dead-letter, events to {sinks} sink{'' if sinks == 1 else 's'}"
        found.figures.append(Figure(name, "msg/s", rates[0], rates[1], "without events", Bar("ratio", least=0.87)))
    return found
