"""python -m controllers.serve --config tiny_chat --address 127.0.0.1:8000"""

from controllers.serve.command import main

if __name__ == "__main__":
    main()
