"""A page about a run, with pictures, made from its trace.

trace.jsonl -> History -> calls:  Clock (seconds of the run, without interruptions), calls with their phases,
                                  rows of clients
                       -> totals: each lease's part of a GPU, and sums
                       -> pictures: where the shapes of the two pictures lie
                       -> page:   page.html.jinja and page.css -> report.html
"""
