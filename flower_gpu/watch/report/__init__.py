"""A page about a run, with pictures, made from its trace.

trace.jsonl -> History -> Clock (seconds of the run, without interruptions)
                       -> calls (each with its phases), holdings (each lease's part of a GPU)
                       -> totals, rows of clients, figures (matplotlib)
                       -> page.html.jinja -> report.html
"""
