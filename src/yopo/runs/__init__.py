"""A whole run: settings become objects, the trainer uses them, and a folder keeps what came out.

A recipe, a YAML file and flags become a Config (`settings`), that becomes network, method and data
(`build`), the trainer makes epochs of them, and `folder` alone knows the files they end up in.
"""
