"""python -m controllers.tinker_server --config tiny_chat --address 127.0.0.1:8000"""

from controllers.tinker_server.command import main

if __name__ == "__main__":
    main()
