from controllers.service.command import main

main()
