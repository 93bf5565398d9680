"""python -m controllers.service --config tiny --address tcp://127.0.0.1:4400"""

from controllers.service.command import main

if __name__ == "__main__":
    main()
