from hpc_train.cli import main

main()
