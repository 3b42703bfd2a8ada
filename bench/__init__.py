"""What Bartleby promises in numbers, measured against the classic queue table in the same run.

lab.py       the private server, fresh databases, connections, and the words for a result
ours.py      Bartleby through raw psycopg
classic.py   the queue table that everybody writes: UPDATE to claim, DELETE to finish
sending.py draining.py failing.py pinned.py history.py waking.py memory.py   what is measured
letters.py console.py streams.py   millions of dead letters, and the console on top of them; site.py asks it
report.py    the table and the JSON
chart.py     the picture
"""
