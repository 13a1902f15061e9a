"""Elastic runs: groups that join and leave (lighthouse, membership, communicator, starter).

What is elsewhere for them alone: `join` and `with_other_groups` of train.py; `newer_than`, `leave` and the
hook `compare_theta` of training/schedules.py; `answer_of`, `finished_before` and `keeps_finished` of
training/claims.py and episodes.py, with `restart`; `writes` of `RunView`; PER_LAUNCH and
`write_pending_lines` of training/run_files.py; the branches on `elastic` of training/build.py and run.py;
`all_groups` of parallel/process_groups.py; `PeerLost`; the settings elastic, lighthouse and group_name; two
commands of cli.py.
"""
