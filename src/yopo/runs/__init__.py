"""A whole run: settings become objects, the trainer uses them, and a folder keeps what came out.

`api` is the way in: a recipe, a YAML file and flags become a Config (`settings`, over each other by
`overlay`), which becomes network, method and optimizer (`build`). The `trainer` lets the `learner`
make steps, `epoch_end` judge them, and the `keeper` save them and go back (`state`); what is
written and read goes through `folder`, which alone knows the files and their names.
"""
