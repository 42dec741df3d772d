"""The page that shows runs, and nothing of the paper: no network is built and nothing is run.

`records` reads folders into Runs; `groups` says which belong together, `headline`, `words`,
`tables`, `curves` and `pictures` make values of them, `page` puts those through its templates.
"""
