import sys
from tests.layouts.test_peak_memory import config_of, peaks
from tests.ranks import run_ranks
from hpc_train.plan.layout import resolve_layout
from hpc_train.plan.memory import estimate
cases=[{'dp': 2, 'batches': 2, 'precision': 'bf16'},{'dp': 2, 'batches': 1, 'precision': 'bf16'},{'dp':2,'batches':2},{'dp':2,'batches':2,'precision':'bf16','data_parallel':'allreduce'}]
def off(rank,world,cases):
    import hpc_train.parallel.replica_engine as r
    import torch
    from tests.layouts import test_peak_memory as t
    K=r.KeptCasts
    r.KeptCasts=lambda parts,dtype: K(parts,None)
    return t.peaks(rank,world,cases)
if __name__=="__main__":
    f=run_ranks(2,peaks,cases,timeout=300)
    o=run_ranks(2,off,cases,timeout=300) if len(sys.argv)>1 else None
    for i,c in enumerate(cases):
        cfg=config_of(**c); e=estimate(cfg,resolve_layout(cfg,1,2))
        print(c, int(e.total), e, f[0][i], o and o[0][i])
