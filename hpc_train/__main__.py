import sys

try:
    from hpc_train.cli import main
except Exception as error:
    from hpc_train.search_path import shadowing_file

    message = shadowing_file(error)
    if message is None:
        raise
    print(message, file=sys.stderr)
    sys.exit(2)

main()
