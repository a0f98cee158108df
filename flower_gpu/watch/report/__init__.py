"""The report of a run: an HTML page with figures, made from the run's trace.

trace.jsonl -> History -> calls:  Clock (seconds of the run, without interruptions), calls with their phases,
                                  rows of clients
                       -> totals: each lease's part of a GPU, and sums
                       -> curves:   the charts of metrics
                       -> pictures: where the shapes of the two pictures over time lie
                       -> page:   page.html.jinja and page.css -> report.html
"""
