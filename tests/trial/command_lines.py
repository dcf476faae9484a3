"""Bad inputs of the trial: what is typed. (`tests/cli/test_mistakes.py` has more of them, in one process.)"""

from __future__ import annotations

import shlex

from tests.trial.case import TINY, Case

# (what is typed, part of the sentence). Lines that begin with + are a tiny experiment with these settings.
LINES = [
    # absurd sizes
    ("+ rounds=1000000000000", "Expected rounds <= 10000000, got 1000000000000 (communication rounds;"),
    ("+ rounds=99999999999999999999999", "Expected rounds <= 10000000, got 99999999999999999999999"),
    ("+ local.steps=50000000", "Expected local.steps <= 1000000, got 50000000 (mini-batch steps per"),
    (
        "+ local.steps=9223372036854775807",
        "Expected local.steps <= 1000000, got 9223372036854775807 (mini-batch",
    ),
    ("+ local.epochs=1000000000", "Expected local.epochs <= 100000, got 1000000000 (passes over the"),
    ("+ local.batch=99999999999999999999", "Expected local.batch <= 10000000, got 99999999999999999999"),
    ("+ clients=100000000", "clients=100000000 with partition.min_size=4 need 400000000 training"),
    ("+ clients=1000000000000", "clients=1000000000000 with partition.min_size=4 need 4000000000000"),
    (
        "+ clusters=100000000 clients=100000000",
        "clients=100000000 with partition.min_size=4 need 400000000 training",
    ),
    (
        "+ 'ensemble=[fedavg*100000000]'",
        "A member of ensemble=['fedavg*100000000'] is wrong: Expected at most",
    ),
    (
        "+ 'ensemble=[fedavg*99999999999999999999]'",
        "A member of ensemble=['fedavg*99999999999999999999'] is wrong:",
    ),
    ("+ 'ensemble=[fedavg*0]'", "A member of ensemble=['fedavg*0'] is wrong: Expected a member such as"),
    ("+ 'ensemble=[fedavg*-3]'", "A member of ensemble=['fedavg*-3'] is wrong: Expected a member such"),
    ("+ 'ensemble=[fedavg*x]'", "A member of ensemble=['fedavg*x'] is wrong: Expected a member such as"),
    ("+ 'ensemble=[fedavg*]'", "A member of ensemble=['fedavg*'] is wrong: Expected a member such as"),
    ("+ 'ensemble=[*5]'", "Expected ensemble to be a list of texts in brackets, got '[*5]'"),
    ("+ 'ensemble=[[fedavg]]'", "Expected ensemble to be a list of texts in brackets, got [['fedavg']]"),
    ("+ sweep.seeds=1000000000", "Expected at most 20000 trials, got sweep.seeds=1000000000 in 'sweep':"),
    (
        "+ sweep.seeds=99999999999999999999",
        "Expected at most 20000 trials, got sweep.seeds=99999999999999999999",
    ),
    ("+ sweep.seeds=0", "Expected sweep.seeds to be a list of different whole numbers, or how"),
    ("+ sweep.seeds=-1", "Expected sweep.seeds to be a list of different whole numbers, or how"),
    ("+ sweep.seeds=1.5", "Expected sweep.seeds to be a list of different whole numbers, or how"),
    ("+ sweep.seeds=many", "Expected sweep.seeds to be a list of different whole numbers, or how"),
    ("+ 'sweep.seeds=[]'", "Expected sweep.seeds to be a list of different whole numbers, or how"),
    ("+ 'sweep.seeds=[1,1]'", "Expected sweep.seeds to be a list of different whole numbers, or how"),
    ("+ 'sweep.seeds=[-1]'", "Expected sweep.seeds to be a list of different whole numbers, or how"),
    ("+ 'sweep.seeds=[a]'", "Expected sweep.seeds to be a list of different whole numbers, or how"),
    (
        "+ sweep.seeds=2 sweep.partition_seeds=1000000000",
        "Expected at most 20000 trials, got sweep.partition_seeds=1000000000",
    ),
    (
        "+ sweep.seeds=100000 sweep.partition_seeds=100000",
        "Expected at most 20000 trials, got sweep.seeds=100000 in 'sweep': ask",
    ),
    (
        "+ sweep.samples=1000000000 sweep.sampler=random 'sweep.sample={local.lr: \"loguniform(0.001, 1)\"}'",
        "Expected at most 20000 trials, got 1000000000: leave out entries,",
    ),
    (
        "+ 'sweep.sample={local.lr: \"loguniform(0.001, 1)\"}'",
        "Expected sweep.sampler=random or optuna beside sweep.sample, got",
    ),
    (
        "+ sweep.sampler=random 'sweep.sample={local.lr: \"loguniform(1, 0.001)\"}'",
        "Expected low < high in sweep.sample.local.lr, got 'loguniform(1,",
    ),
    (
        "+ sweep.sampler=random 'sweep.sample={local.lr: \"loguniform(-1, 1)\"}'",
        "Expected local.lr > 0, got -1 in 'sweep' (learning rate; default 0.05)",
    ),
    (
        "+ sweep.sampler=random 'sweep.sample={local.lr: \"gauss(0, 1)\"}'",
        "Expected a distribution for sweep.sample.local.lr, got 'gauss(0, 1)':",
    ),
    (
        "+ sweep.sampler=random 'sweep.sample={local.lr: __import__(0)}'",
        "Expected a distribution for sweep.sample.local.lr, got",
    ),
    (
        "+ sweep.sampler=random 'sweep.sample={local.lr: uniform(0.1)}'",
        "Expected a distribution for sweep.sample.local.lr, got",
    ),
    (
        "+ sweep.sampler=random 'sweep.sample={local.nothing: \"uniform(0, 1)\"}'",
        "Unknown setting 'local.nothing' in 'sweep'. Did you mean",
    ),
    ("+ 'sweep.grid={local.nothing: [1]}'", "Unknown setting 'local.nothing' in 'sweep'. Did you mean"),
    (
        "+ 'sweep.grid={local.lr: []}'",
        "Expected sweep.grid.local.lr to be a list with an entry at least, got",
    ),
    (
        "+ 'sweep.grid={local.lr: 0.1}'",
        "Expected sweep.grid.local.lr to be a list with an entry at least, got",
    ),
    (
        "+ 'sweep.grid={local.lr: [-1, 0.1]}'",
        "Expected local.lr > 0, got -1 in 'sweep' (learning rate; default 0.05)",
    ),
    ("+ 'sweep.grid=[1]'", "Expected settings inside sweep.grid, got [1] in 'sweep"),
    ("+ 'sweep.cases=[1]'", "Expected an entry of sweep.cases to be settings, got 1 in 'sweep': as"),
    (
        "+ 'sweep.cases=[{nothing: 1}]'",
        "Unknown setting 'nothing' in 'sweep'. `list settings` shows them all",
    ),
    ("+ 'sweep.methods=[nope]'", "Unknown method 'nope'. Choices: apfl, cfl,"),
    ("+ 'sweep.methods=[]'", "Expected sweep.methods to be a list with an entry at least, got [] in"),
    ("+ 'sweep.clusters=[0]'", "Expected clusters >= 1, got 0 in 'sweep' (number of cluster models K,"),
    ("+ 'sweep.clusters=[99999999]'", "Expected clusters <= clients, got clusters=99999999 and clients=4:"),
    ("+ 'sweep.partitions=[nope]'", "Unknown partition 'nope'. Choices: balanced_dirichlet,"),
    ("+ 'sweep.data=[nope]'", "Unknown data set 'nope'. Did you mean 'npz'? Choices: bloodmnist,"),
    (
        "+ sweep.seeds=2 sweep.concurrent=0",
        "Expected sweep.concurrent >= 1, got 0 in 'sweep' (trials at a time",
    ),
    (
        "+ sweep.seeds=2 sweep.scheduler=nope",
        "Unknown scheduler 'nope'. Did you mean 'none'? Choices: asha, median,",
    ),
    (
        "+ sweep.seeds=2 sweep.table=99.9",
        "Expected sweep.table to be text, got 99.9 in 'sweep' (published table",
    ),
    (
        "+ sweep.seeds=2 sweep.nothing=3",
        "Unknown setting 'sweep.nothing' in 'sweep'. Choices: cases,",
    ),
    (
        "+ sweep.seeds=2 sweep.fleet=nowhere",
        "Unknown sweep.fleet 'nowhere' in 'sweep' (a trial's clients in its",
    ),
    ("+ sweep=3", "Unknown setting 'sweep'. Did you mean 'aggregation.sweeps'? `list"),
    # models and data of absurd size
    (
        "+ 'model.hidden=[1000000000]' model=mlp",
        "Expected a network that fits into memory, got one of 75,000,000,010",
    ),
    (
        "+ 'model.hidden=[100000,100000,100000]' model=mlp",
        "Expected a network that fits into memory, got one of 20,007,700,010",
    ),
    (
        "+ data=synthetic data.samples=1000000000000 model=linear",
        "Expected data.samples x data.dimension <= 1000000000, got",
    ),
    (
        "+ data=synthetic data.samples=100000000 data.dimension=100000",
        "Expected data.samples x data.dimension <= 1000000000, got 100000000 x",
    ),
    (
        "+ data=synthetic data.sources=1000000000",
        "data.samples=4000 cannot give each of data.sources=1000000000",
    ),
    (
        "+ partition=dirichlet partition.min_size=100000000",
        "clients=4 with partition.min_size=100000000 need 400000000 training",
    ),
    (
        "+ partition=cluster_dirichlet partition.groups=1000000000",
        "partition.groups=1000000000 is more than clients=4: every group needs",
    ),
    (
        "+ partition=multilevel 'partition.level_groups=[100000000,200000000]'",
        "partition.level_groups go from few to many groups, of at least two",
    ),
    (
        "+ partition=labels partition.classes=1000000",
        "Unknown partition 'labels'. Choices: balanced_dirichlet,",
    ),
    (
        "+ 'partition.size_range=[5,2]' partition=mixture data=synthetic",
        "Expected partition.mixture to be linear, random or a ratio of the 4",
    ),
    (
        "+ partition.mixture=200:-100 partition=mixture data=synthetic",
        "Expected partition.mixture to be linear, random or a ratio of the 4",
    ),
    (
        "+ partition.mixture=abc partition=mixture data=synthetic",
        "Expected partition.mixture to be linear, random or a ratio of the 4",
    ),
    ("+ data.label_swaps=1000000000", "data.label_swaps=1000000000 needs as many classes, but 'digits' has"),
    ("+ data.noises=1000000000", "data.noises=1000000000 is more than clients=4: every shift needs a"),
    ("+ evaluation.every=0", "Expected evaluation.every >= 1, got 0 (evaluate every this many"),
    ("+ evaluation.batch=0", "Expected evaluation.batch >= 1, got 0 (samples per forward pass;"),
    ("+ records.clients=1", "Expected records.clients >= 2, got 1 (clients that are compared at"),
    ("+ checkpoint.every=0", "Expected checkpoint.every >= 1, got 0 (write a checkpoint every this"),
    ("+ checkpoint.keep=0", "Expected checkpoint.keep >= 1, got 0 (checkpoints kept on disk;"),
    ("+ checkpoint.minutes=-1", "Expected checkpoint.minutes >= 0, got -1 (and whenever the last one"),
    ("+ checkpoint.minutes=nan", "Expected checkpoint.minutes to be a finite number, got 'nan' (and"),
    ("+ fleet.restarts=-1", "Expected fleet.restarts >= 0, got -1 (how many lost actors or nodes a"),
    ("+ participation.dropouts=1", "Expected 0 <= participation.dropouts < 1, got 1 (share of the"),
    (
        "+ update.bits=9 'update=[quantise]'",
        "Expected 1 <= update.bits <= 8, got 9 (quantise: bits of a number;",
    ),
    ("+ 'update=[nope]'", "Unknown update transform 'nope'. Did you mean 'topk'? Choices: clip,"),
    ("+ server.optimizer=nope", "Unknown server optimizer 'nope'. Choices: adagrad, adam, sgd, yogi"),
    (
        "+ attack=nope participation.attackers=0.2",
        "Unknown attack 'nope'. Choices: alie, free_rider, gaussian_attack,",
    ),
    ("+ aggregation=nope", "Unknown aggregation rule 'nope'. Choices: matched, mean, median,"),
    (
        "+ aggregation=trimmed_mean aggregation.trim=0.5",
        "Expected 0 <= aggregation.trim < 0.5, got 0.5 (trimmed_mean: share",
    ),
    ("+ local.engine=nope", "Unknown engine 'nope'. Did you mean 'loop'? Choices: compiled, loop,"),
    ("+ local.engine=os.system", "Expected engine 'os.system' to be a subclass of Engine, got <built-in"),
    ("+ 'callbacks=[nope]'", "Expected callbacks to list what can be found, got 'nope': Unknown"),
    ("+ 'callbacks=[os.path]'", "Expected callback 'os.path' to be a subclass of Callback, got <module"),
    ("+ 'loggers=[nope]'", "Expected loggers to list what can be found, got 'nope': Unknown"),
    ("+ model=linear 'model.head=[nothing]'", "Unknown submodule 'nothing' in model.head. Choices: fc1"),
    ("+ model.target=os", "Expected model.target as package.module.Class, got 'os': write where"),
    ("+ model.target=os.path.join", "Expected model.target to name a LightningModule, got 'os.path.join'"),
    ("+ model.target=..", "Expected model.target as package.module.Class, got '..': write where"),
    ("+ model.target=", "Expected a value after 'model.target=', got nothing: it takes text or"),
    ("+ 'plugins=[nope]'", "Plug-in 'nope' (setting plugins) cannot be found: expected an"),
    ("+ 'plugins=[../nope]'", "Expected plugins to name modules, as in plugins=[package.module], got"),
    ("+ 'plugins=[nope.py]'", "Plug-in 'nope.py' (setting plugins) cannot be found: expected an"),
    ("+ plugins=nope", "Expected plugins to be a list of texts in brackets, got 'nope'"),
    (
        "+ data=datamodule data.target=os.getcwd",
        "Expected data.target to name a LightningDataModule, got 'os.getcwd'",
    ),
    ("+ data=datamodule", "Expected data.target to name a LightningDataModule, got nothing:"),
    # texts that are none
    ("+ 'name=a\x00b'", "Expected name to be up to 200 letters, digits and . _ + = @ - (no"),
    ("+ name=''", "Expected a value after 'name=', got nothing: it takes text or null"),
    ("+ name=" + "n" * 300, "Expected name to be up to 200 letters, digits and . _ + = @ - (no"),
    ("+ name=CON:", "Expected name to be up to 200 letters, digits and . _ + = @ - (no"),
    ("+ name=-x", "Expected name to be up to 200 letters, digits and . _ + = @ - (no"),
    ("+ 'name=\U0001f600'", "Expected name to be up to 200 letters, digits and . _ + = @ - (no"),
    ("+ storage=/proc/nowhere", "Cannot make the run directory /proc/nowhere/x (No such file or"),
    ("+ storage=/dev/null", "Expected storage to be a folder, got '/dev/null', where '/dev/null'"),
    ("+ storage=''", "Expected a value after 'storage=', got nothing: it takes text (folder"),
    ("+ storage=s3://", "Expected an address as in s3://bucket/results, got 's3://', which"),
    ("+ 'storage=file://'", "Expected an address as in s3://bucket/results, got 'file://', which"),
    (
        "+ storage=s3://me:secret@bucket/x",
        "Expected an address without keys in it, got 's3://***@bucket/x': set",
    ),
    ("+ 'storage=s3://bucket/x?secret_key=7'", "Expected an address without keys in it, got"),
    (
        "report s3://me:secret@bucket/x",
        "Expected an address without keys in it, got 's3://***@bucket/x': set",
    ),
    ("resume s3://me:secret@bucket/x", "Expected an address without keys in it, got"),
    ("+ method=fedavg+", "Unknown add-on ''. Choices: cam, cks, con, few_shots, finetune, prox"),
    ("+ method=+", "Unknown method ''. Choices: apfl, cfl,"),
    ("+ method=fedavg+finetune+finetune", "Expected add-on 'finetune' once, got it twice in"),
    ("+ method=fedavg+fedavg", "fedavg' is a base method and cannot be added to 'fedavg': write"),
    ("+ 'method=${oc.env:HOME}'", "'. Choices: apfl, cfl,"),
    ("+ 'rounds=${oc.env:NOPE}'", "Expected rounds='${oc.env:NOPE}' to refer to a setting or, as"),
    ("+ 'seed=${seed}'", "Expected seed='${seed}' to refer to a setting or, as ${oc.env:NAME},"),
    ("+ 'name=${name}'", "Expected name='${name}' to refer to a setting or, as ${oc.env:NAME},"),
    ("+ 'rounds=${rounds'", "Expected rounds to be a whole number, got '${rounds' (communication"),
    ("+ local.lr=1e400", "Expected local.lr to be a finite number, got inf (learning rate;"),
    ("+ local.lr='[0.1]'", "Expected local.lr to be a number, got [0.1] (learning rate)"),
    ("+ local.lr='{a: 1}'", "Expected local.lr to be a number, got {'a': 1} (learning rate)"),
    (
        "+ local.lr='!!python/name:os.system'",
        "Expected local.lr to be a number, got '!!python/name:os.system'",
    ),
    ("+ rounds='*a'", "Expected rounds to be a whole number, got '*a' (communication rounds)"),
    ("+ seed=true", "Expected seed to be a whole number, got true (seed of every random"),
    ("+ 'local.trainer=3' local.engine=trainer", "Expected local.trainer to be a section of its own, as in"),
    (
        "+ local.engine=trainer local.trainer.nothing=3",
        "lightning.Trainer cannot be made with local.trainer.nothing=3:",
    ),
    (
        "+ local.engine=trainer 'local.trainer.callbacks=[os.path]'",
        "Expected local.trainer.callbacks to name a Callback, got 'os.path'",
    ),
    ("+ method=ifca ifca.init=nope", "Unknown ifca.init 'nope' (first models: independent draws, one draw"),
    ("+ method=fedem+finetune+cam", "finetune' cannot be added to 'fedem': its clients predict with models"),
    ("+ clusters=auto method=fedavg", "Expected a clustered method with clusters=auto, got 'fedavg': use"),
    ("+ holdout_clients=1", "Expected 0 <= holdout_clients < 1, got 1 (share of the clients that"),
    (
        "+ fleet.address=127.0.0.1:1 fleet.backend=ray",
        "Expected a Ray cluster at '127.0.0.1:1', got none that answers",
    ),
    (
        "+ fleet.address=127.0.0.1:99999999 fleet.backend=ray",
        "Expected fleet.address as host:port, auto or local, got",
    ),
    (
        "+ fleet.address=http://x fleet.backend=ray",
        "Expected fleet.address as host:port, auto or local, got 'http://x':",
    ),
    # other commands
    ("report", "Expected run directories or sweeps after report, got none: as in"),
    ("report {folder}", "Expected a run directory or a sweep, got"),
    ("report {folder}/missing", "Expected a run directory or a sweep, but there is no"),
    ("report {folder} test=nope", "Unknown test 'nope'. Choices: t, wilcoxon"),
    ("report out={folder}/x", "Expected run directories or sweeps after report, got none: as in"),
    ("report /dev/null", "Expected a run directory or a sweep, got /dev/null: give one that a"),
    ("report s3://", "Expected an address as in s3://bucket/results, got 's3://', which"),
    ("report nowhere://x/y", "Expected storage to be a folder or an address that pyarrow or fsspec"),
    ("resume {folder}", "is not a run directory: it has no config.yaml and status.json"),
    ("resume /dev/null", "/dev/null is not a run directory: it has no config.yaml and"),
    ("resume nowhere://x/y", "Expected storage to be a folder or an address that pyarrow or fsspec"),
    ("resume {folder}/a {folder}/b", "Expected `archipelago resume RUN`, got"),
    ("resume --nothing x", "Unknown option '--nothing'. `archipelago resume --help` shows all"),
    ("resume ''", "is not a run directory: it has no config.yaml and status.json"),
    ("data", "Expected `archipelago data list` or `archipelago data fetch NAME`,"),
    ("data fetch", "Expected `archipelago data fetch NAME`, got no name: `data list`"),
    ("data fetch nope", "Unknown data set 'nope'. Did you mean 'npz'? Choices: bloodmnist,"),
    (
        "data list data.root={folder}/missing nope",
        "Expected `archipelago data list`, got 'nope' too: leave it out",
    ),
    ("data nope", "Expected `archipelago data list` or `archipelago data fetch NAME`,"),
    ("partition clients=0", "Expected clients >= 1, got 0 (number of clients; default 20)"),
    ("partition clients=100000000", "clients=100000000 with partition.min_size=4 need 400000000 training"),
    ("partition data=nope", "Unknown data set 'nope'. Did you mean 'npz'? Choices: bloodmnist,"),
    (
        "partition partition=cluster_dirichlet partition.groups=1000000000",
        "partition.groups=1000000000 is more than clients=20: every group",
    ),
    ("choose-clusters clients=0", "Expected clients >= 1, got 0 (number of clients; default 20)"),
    (
        "choose-clusters method=fedavg fleet.backend=in_process",
        "Expected a clustered method with clusters=auto, got 'fedavg': use",
    ),
    ("list nope", "Unknown kind or entry 'nope' to list. Did you mean 'none'? Kinds:"),
    ("list methods nope", "Expected `archipelago list [KIND | NAME] [plugins=[MODULE, ...]]`,"),
    ("list 'plugins=[nope]'", "Plug-in 'nope' (setting plugins) cannot be found: expected an"),
    ("list plugins=3", "Expected plugins to be a list of texts in brackets, got 3 (modules of"),
    ("--config /dev/zero", "Expected a YAML file after --config, got '/dev/zero', a pipe or a"),
    ("--config /dev/stdin", "Expected a YAML file after --config, got '/dev/stdin', a pipe or a"),
    ("--config ''", "Expected a file after --config, got nothing: as in --config"),
    ("--config {folder}/" + "n" * 300 + ".yaml", "Expected a YAML file after --config, got"),
    ("--install-completion tcsh", "Expected a shell after --install-completion, got 'tcsh'. Did you mean"),
    ("help nope", "Unknown command 'nope' after help. Choices: choose-clusters,"),
]


def _case(typed: str, says: str) -> Case:
    if not typed.startswith("+ "):
        return Case(typed, typed, says)
    given = {word.partition("=")[0] for word in shlex.split(typed)}
    kept = [word for word in TINY.split() if word.partition("=")[0] not in given]
    return Case(typed, f"{' '.join(kept)} {typed[2:]}", says)


CASES = [_case(typed, says) for typed, says in LINES]
