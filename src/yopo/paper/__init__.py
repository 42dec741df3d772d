"""The paper's tables, and ours beside them: all that knows of them is here, above the report.

`tables` are the paper's own numbers, `reproduction` says what is run for each row, and `running`
runs it: `reproduce`, a function that `yopo reproduce` calls.
Back from the run folders: `reproduced` sums them up and `words` shows that as a table, ours / the
paper's; `beside` puts any runs beside a table, for `yopo report --paper`. The report
takes such a table as given and knows no paper, so there is one room to look in for either.
"""
